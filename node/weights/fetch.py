"""Frames of an artifact from a hub: in parallel, resumable, each verified as it arrives.

    frames wanted -> ranges of about 8 MiB -> streams, spread over the channels

    line cut, stream ended early, no byte for stall_s   go on at the byte where it stopped, after a backoff
    a frame that fails its digest                       ask for this frame alone, from its first byte
    an answer nobody asked for, a lying offset          cut that stream, go on as after a lost line

Attempts are bounded where nothing is won by them: in a row without one byte of progress, and per
damaged frame. There is no deadline on a whole transfer: a slow link is not an error.
"""

import asyncio
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc
import grpc.aio

from heterorl.v1 import policy_pb2, policy_pb2_grpc
from node import limits
from node.errors import Reason, RefusedError
from node.policy import ArtifactKey
from node.rpc.channel import Backoff, ConnectionLost, call, classified
from node.telemetry.transfer_metrics import TransferMetrics
from node.weights.apply import DamagedFrameError
from node.weights.manifest import Manifest, verify_signed
from node.wire import artifact_key_to_wire

log = logging.getLogger(__name__)

PutFrame = Callable[[int, bytes], None]
"""Takes a frame's payload, in a thread; raises DamagedFrameError to have it fetched again."""

_PASSING: Final = frozenset({Reason.BUSY, Reason.DRAINING, Reason.DISK, Reason.DAMAGED})
"""Refusals that pass while the plan stays right."""

_MANIFEST_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """How hard to try."""

    streams: int = 4
    """Ranges in flight, over all channels; two per connection fill it."""
    range_bytes: int = 8 << 20
    stall_s: float = 20.0
    attempts: int = 8
    """In a row without a byte: with the backoff about 13 s, at most 25 s."""
    attempts_per_damaged_frame: int = 3


class Fetcher:
    """Fetches manifests and frames from one hub."""

    def __init__(
        self,
        channels: Sequence[grpc.aio.Channel],
        *,
        public_key: bytes,
        run_id: str,
        metrics: TransferMetrics,
        random: Callable[[], float],
        limits: FetchLimits | None = None,
    ) -> None:
        """Fetch over ``channels``, at least one: more connections carry more over a long way."""
        self._stubs = [policy_pb2_grpc.PolicyServiceStub(channel) for channel in channels]
        self._public_key = public_key
        self._run_id = run_id
        self._metrics = metrics
        self._random = random
        self._limits = limits or FetchLimits()

    async def manifest(self, key: ArtifactKey) -> Manifest:
        """Give the manifest of an artifact, its signature and run verified.

        Raises:
            RefusedError: UNKNOWN_VERSION; BAD_SIGNATURE and others of ``verify_signed``;
                MALFORMED, if it is the manifest of another artifact.
            ConnectionLost: after ``attempts``.
        """
        attempts = _Attempts(self._limits.attempts, Backoff(self._random))
        request = policy_pb2.GetManifestRequest(key=artifact_key_to_wire(key))
        while True:
            try:
                answer = await call(self._stubs[0].GetManifest, request, timeout_s=_MANIFEST_TIMEOUT_S)
                break
            except (ConnectionLost, RefusedError) as error:
                await attempts.wait_after(error)
        manifest = await asyncio.to_thread(
            verify_signed, answer.signed_manifest, public_key=self._public_key, run_id=self._run_id
        )
        if manifest.key != key:
            raise RefusedError(Reason.MALFORMED, f"the hub gave the manifest of {manifest.key} for {key}")
        return manifest

    async def fetch(self, manifest: Manifest, frames: Iterable[int], put: PutFrame) -> None:
        """Hand each frame's payload to ``put``, in any order, several at a time.

        Raises:
            DamagedFrameError: a frame failed its digest ``attempts_per_damaged_frame`` times.
            RefusedError: the hub refuses for a reason that does not pass; UNKNOWN_VERSION: plan again.
            ConnectionLost: after ``attempts`` in a row without a byte.
        """
        transfer = _Transfer(manifest, put, deque(self._ranges(manifest, frames)))
        streams = min(self._limits.streams, len(transfer.ranges))
        try:
            async with asyncio.TaskGroup() as group:
                for stub in itertools.islice(itertools.cycle(self._stubs), streams):
                    group.create_task(self._drain_ranges(stub, transfer))
        except ExceptionGroup as failures:
            # The first to fail cancelled the others.
            raise failures.exceptions[0] from None

    def _ranges(self, manifest: Manifest, frames: Iterable[int]) -> Iterator[deque[int]]:
        """Cut ``frames`` so that every stream has something to do and no range is over its limits."""
        wanted = list(frames)
        total_bytes = sum(manifest.frames[frame].payload_bytes for frame in wanted)
        most_bytes = min(self._limits.range_bytes, total_bytes // self._limits.streams)
        pending: deque[int] = deque()
        pending_bytes = 0
        for frame in wanted:
            pending.append(frame)
            pending_bytes += manifest.frames[frame].payload_bytes
            if pending_bytes >= most_bytes or len(pending) == limits.FRAMES_PER_FETCH:
                yield pending
                pending, pending_bytes = deque(), 0
        if pending:
            yield pending

    async def _drain_ranges(
        self, stub: "policy_pb2_grpc.PolicyServiceAsyncStub", transfer: "_Transfer"
    ) -> None:
        attempts = _Attempts(self._limits.attempts, Backoff(self._random))
        while transfer.ranges:
            pending = transfer.ranges.popleft()
            partial = bytearray()
            while pending:
                try:
                    await self._read(stub, transfer, pending, partial, attempts)
                except DamagedFrameError:
                    raise
                except (ConnectionLost, RefusedError) as error:
                    await attempts.wait_after(error)

    async def _read(
        self,
        stub: "policy_pb2_grpc.PolicyServiceAsyncStub",
        transfer: "_Transfer",
        pending: deque[int],
        partial: bytearray,
        attempts: "_Attempts",
    ) -> None:
        """Read one stream; what arrived is gone from ``pending``, or in ``partial``, however it ends."""
        key = transfer.manifest.key
        request = policy_pb2.FetchFramesRequest(
            key=artifact_key_to_wire(key), frames=pending, first_offset_bytes=len(partial)
        )
        stream = stub.FetchFrames(request)
        try:
            while pending:
                message = await self._next(stream)
                size_bytes = transfer.manifest.frames[pending[0]].payload_bytes
                _check_chunk(message, frame=pending[0], offset_bytes=len(partial), size_bytes=size_bytes)
                attempts.reset()
                self._metrics.count_received(key, len(message.data))
                partial += message.data
                if len(partial) == size_bytes:
                    payload = bytes(partial)
                    partial.clear()
                    await self._deliver(transfer, pending.popleft(), payload)
        finally:
            stream.cancel()

    async def _next(
        self,
        stream: "grpc.aio.UnaryStreamCall[policy_pb2.FetchFramesRequest, policy_pb2.FetchFramesResponse]",
    ) -> policy_pb2.FetchFramesResponse:
        try:
            with classified():
                async with asyncio.timeout(self._limits.stall_s):
                    message = await stream.read()
        except TimeoutError:
            raise ConnectionLost(f"no byte for {self._limits.stall_s:g} s") from None
        if not isinstance(message, policy_pb2.FetchFramesResponse):
            raise ConnectionLost("the stream ended before the last frame")
        return message

    async def _deliver(self, transfer: "_Transfer", frame: int, payload: bytes) -> None:
        try:
            await asyncio.to_thread(transfer.put, frame, payload)
        except DamagedFrameError as error:
            self._metrics.count_damaged_frame()
            transfer.damaged[frame] += 1
            log.warning(
                "a frame arrived damaged",
                extra={"version": transfer.manifest.version, "frame": frame, "error": str(error)},
            )
            if transfer.damaged[frame] >= self._limits.attempts_per_damaged_frame:
                raise
            transfer.ranges.append(deque([frame]))


@dataclass(slots=True)
class _Transfer:
    manifest: Manifest
    put: PutFrame
    ranges: deque[deque[int]]
    damaged: Counter[int] = field(default_factory=Counter)


class _Attempts:
    """Bounds failures in a row."""

    def __init__(self, limit: int, backoff: Backoff) -> None:
        self._limit = limit
        self._backoff = backoff
        self._failed = 0

    def reset(self) -> None:
        self._failed = 0
        self._backoff.reset()

    async def wait_after(self, error: ConnectionLost | RefusedError) -> None:
        """Wait before the next attempt, or raise ``error`` if it will not pass or there were too many."""
        self._failed += 1
        passes = isinstance(error, ConnectionLost) or error.reason in _PASSING
        if not passes or self._failed >= self._limit:
            raise error
        log.debug("trying again", extra={"error": str(error), "failed": self._failed})
        await self._backoff.wait()


def _check_chunk(
    message: policy_pb2.FetchFramesResponse, *, frame: int, offset_bytes: int, size_bytes: int
) -> None:
    size_ok = 1 <= len(message.data) <= min(limits.CHUNK_BYTES, size_bytes - offset_bytes)
    if message.frame != frame or message.offset_bytes != offset_bytes or not size_ok:
        raise ConnectionLost(
            f"the hub sent {len(message.data)} bytes of frame {message.frame} at {message.offset_bytes}, "
            f"where frame {frame} at {offset_bytes} of {size_bytes} was due"
        )
