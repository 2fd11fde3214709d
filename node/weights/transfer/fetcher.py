"""Frames of an artifact from its sources: in parallel, resumable, each verified as it arrives.

    frames wanted -> ranges that take a lane a moment -> lanes, each reading one from one source at a time

    link cut, stream ended early, no byte for stall_s   go on at the byte where it stopped, or elsewhere
    asked for in advance (expected.py)                  the first range is on its way already
    a frame that fails its digest                       ask for this frame alone, from its first byte
    an answer nobody asked for, a lying offset          set that source aside, go on elsewhere
    a lane without a range                              take over what a slower source would finish late

Attempts are bounded where nothing is won by them: in a row without one byte of progress, and per
damaged frame. There is no deadline on a whole transfer: a slow link is not an error.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from heterorl.v1 import policy_pb2
from node import limits
from node.errors import Reason, Recovery, RefusedError
from node.policy import Artifact, ArtifactKey
from node.rpc.channel import Backoff, ConnectionLost, call, classified
from node.telemetry.transfer_metrics import TransferMetrics
from node.waits import wait_at_most
from node.weights.assembly.apply import DamagedFrameError
from node.weights.format.manifest import Manifest, verify_signed
from node.weights.planning.link_time import Link, Progress
from node.weights.transfer.artifact_prefetch import ArtifactPrefetch, Chunk, ChunkStream
from node.weights.transfer.decode_queue import DecodeQueue, NotTakenError
from node.weights.transfer.paused_transfers import PausedTransfers
from node.weights.transfer.payload_order import fetch_order, pushed_frames
from node.weights.transfer.ranges import LyingSourceError, PutFrame, Range, Transfer, Unasked
from node.weights.transfer.retries import Attempts
from node.weights.transfer.source_scores import Fault
from node.weights.transfer.sources import Sources
from node.wire import artifact_key_to_wire

logger = logging.getLogger(__name__)

_MANIFEST_TIMEOUT_S: Final = 60.0

_RANGE_S: Final = 0.5
"""How long a range should take a lane: some round trips, so that asking costs little; and no more, so that
a frame is whole soon, at each of a chain of relays."""

_GROWTH: Final = 4
"""Of a range over the one before: TCP, which begins slowly, at most doubles."""

_RANGES_PER_LANE: Final = 2
"""Of what is left, at the end: so that all lanes end at about the same time."""

_WORTH_TAKING_S: Final = 1.0
"""A range is taken over from a slower source if that saves this much and halves the time."""

_MOST_TAKEOVERS: Final = 2
"""Of one range: where every source waits for the same upstream, moving it on wins nothing."""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """How hard to try."""

    streams: int = 3
    """Ranges in flight per connection: it is not idle while one of them is asked for."""
    most_streams: int = 32
    """Over all sources; half of what a hub allows one peer."""
    range_bytes: int = 2 << 20
    """At most: lanes then stay near each other, and a relay has what those behind it ask for."""
    least_range_bytes: int = 256 << 10
    """Less is not worth a lane of its own."""
    part_bytes: int = 16 << 10
    """Of a frame, at least; and of what a lane asks for first, while nothing is known of the link."""
    stall_s: float = 20.0
    attempts: int = 8
    """In a row without a byte: with the waits between about 10 s, at most 20 s. As many for each source."""
    longest_wait_s: float = 5.0
    """Between two attempts: another artifact may be had while this one is not."""
    attempts_per_damaged_frame: int = 3


class Fetcher:
    """Fetches manifests and frames from whoever has them."""

    def __init__(
        self,
        sources: Sources,
        *,
        public_key: bytes,
        run_id: str,
        metrics: TransferMetrics,
        random: Callable[[], float],
        limits: FetchLimits | None = None,
    ) -> None:
        self._sources = sources
        self._public_key = public_key
        self._run_id = run_id
        self._metrics = metrics
        self._random = random
        self._limits = limits or FetchLimits()
        self._prefetch: ArtifactPrefetch | None = None
        self.link = Link()
        """As measured by what was fetched."""
        self.progress = Progress(time.monotonic())
        """Of the fetch under way, or the last one."""
        self._paused = PausedTransfers(metrics)

    def prefetch(self, held_version: int, tasks: asyncio.TaskGroup, *, artifact_cost_bytes: int = 0) -> None:
        """Ask in advance for what comes after a version, in a task of ``tasks``.

        ``signed_manifest`` and ``fetch`` then find it here, or on its way. What was expected before is not
        expected any more.

        Args:
            held_version: what the next artifact has to start from, unless it starts from nothing.
            tasks: owns the task.
            artifact_cost_bytes: as in ``chain.plan_catch_up``, by which the source chooses.
        """
        if self._prefetch is not None:
            if self._prefetch.held_version == held_version and self._prefetch.is_waiting:
                return
            self._prefetch.forget()
        self._prefetch = ArtifactPrefetch(
            held_version,
            artifact_cost_bytes=artifact_cost_bytes,
            sources=self._sources,
            verify=self._verify,
            answered=self._answered,
            random=self._random,
            tasks=tasks,
        )

    async def pushed_artifact(
        self, held_version: int, tasks: asyncio.TaskGroup, *, patience_s: float
    ) -> Artifact | None:
        """Return what a source chooses to send to who holds a version: in one round trip, with its frames.

        It was asked for in advance, or is asked for now; None: nothing comes in time.
        """
        expected = self._prefetch
        if expected is None or expected.held_version != held_version or expected.is_spent:
            self.prefetch(held_version, tasks, artifact_cost_bytes=self.link.artifact_cost_bytes)
        assert self._prefetch is not None
        return await self._prefetch.artifact(patience_s=patience_s)

    def give_up(self) -> None:
        """Note that the fetch under way is dropped: a link that was silent for so long may be that long."""
        self.link = self.link.silent(self.progress.silence_s(time.monotonic()))

    async def manifest(self, key: ArtifactKey) -> Manifest:
        """Give the manifest of an artifact; see ``signed_manifest``."""
        return (await self.signed_manifest(key))[0]

    async def signed_manifest(self, key: ArtifactKey) -> tuple[Manifest, bytes]:
        """Give the manifest of an artifact, its signature and run verified, and its bytes as signed.

        Raises:
            RefusedError: UNKNOWN_VERSION; BAD_SIGNATURE and others of ``verify_signed``;
                MALFORMED, if it is the manifest of another artifact.
            ConnectionLost: after ``attempts``.
        """
        self.progress = Progress(time.monotonic())
        pushed = None if self._prefetch is None else await self._prefetch.answer(key)
        if pushed is not None:
            self._sources.signed(pushed.manifest)
            self.progress.signed(pushed.manifest.size_bytes, now=time.monotonic())
            return pushed.manifest, pushed.signed
        attempts = self._attempts()
        while True:
            name = self._sources.choose(self._names(key))
            try:
                manifest, signed = await self._signed_manifest(name, key)
            except (ConnectionLost, RefusedError) as error:
                await self._blame(name, key, error, attempts)
                continue
            self._sources.signed(manifest)
            self.progress.signed(manifest.size_bytes, now=time.monotonic())
            return manifest, signed

    async def fetch(self, manifest: Manifest, frames: Iterable[int], put: PutFrame) -> None:
        """Hand each frame's payload to ``put``, in any order, several at a time.

        Raises:
            DamagedFrameError: a frame failed its digest ``attempts_per_damaged_frame`` times.
            RefusedError: the sources refuse for a reason that does not pass; UNKNOWN_VERSION: plan again.
            ConnectionLost: after ``attempts`` in a row without a byte.
        """
        connections = self._sources.connections(self._names(manifest.key))
        lanes = min(self._limits.streams * connections, self._limits.most_streams)
        frames = [frame for frame in frames if manifest.frames[frame].payload_bytes]
        transfer = self._paused.take(manifest, frames, put)
        transfer = transfer or self._begun(manifest, frames, put, lanes=lanes)
        left_bytes = transfer.unasked.left_bytes
        most_ranges = len(transfer.waiting) + -(-left_bytes // self._limits.least_range_bytes)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(lanes, most_ranges)):
                    group.create_task(self._run_lane(transfer, lanes=lanes))
        except ExceptionGroup as failures:
            # The first to fail cancelled the others.
            first = failures.exceptions[0]
            raise first.refusal if isinstance(first, NotTakenError) else first from None
        finally:
            transfer.pause()
            if not transfer.is_over:
                self._paused.keep(transfer)
            took_s = self.progress.last_at_s - self.progress.first_at_s
            self.link = self.link.carried(self.progress.arrived_bytes, took_s=took_s)

    def _begun(self, manifest: Manifest, frames: Sequence[int], put: PutFrame, *, lanes: int) -> Transfer:
        waiting = self._pushed(manifest, frames)
        pushed = {frame for span in waiting for frame in span.frames}
        rest = [frame for frame in frames if frame not in pushed]
        unasked = Unasked(
            manifest,
            fetch_order(manifest, rest) if lanes > 1 else rest,
            part_bytes=self._limits.part_bytes if lanes > 1 else None,
        )
        return Transfer(manifest, put, waiting, unasked)

    def _pushed(self, manifest: Manifest, frames: Iterable[int]) -> deque[Range]:
        """Give the frames that are on their way, if all of them are wanted."""
        pushed = None if self._prefetch is None else self._prefetch.take(manifest)
        if pushed is None:
            return deque()
        cost_bytes = pushed.artifact_cost_bytes
        coming = pushed_frames(manifest, most_bytes=limits.PUSH_BYTES, artifact_cost_bytes=cost_bytes)
        if not coming or not set(coming).issubset(frames):
            pushed.stream.cancel()
            return deque()
        return deque([Range(deque(coming), source=pushed.source, stream=pushed.stream)])

    def _attempts(self) -> Attempts:
        backoff = Backoff(self._random, cap_s=self._limits.longest_wait_s)
        return Attempts(self._limits.attempts * len(self._sources), backoff)

    def _names(self, key: ArtifactKey) -> tuple[str, ...]:
        names = self._sources.candidates(key)
        if not names:
            raise RefusedError(
                Reason.UNKNOWN_VERSION,
                f"no source has version {key.version} from {key.base_version} any more",
                fix="plan again from a new announcement",
            )
        return names

    async def _signed_manifest(self, name: str, key: ArtifactKey) -> tuple[Manifest, bytes]:
        request = policy_pb2.GetManifestRequest(key=artifact_key_to_wire(key))
        asked_at_s = time.monotonic()
        try:
            with self._sources.lane(name) as stub:
                answer = await call(stub.GetManifest, request, timeout_s=_MANIFEST_TIMEOUT_S)
        except RefusedError:
            self._answered(time.monotonic() - asked_at_s)
            raise
        self._answered(time.monotonic() - asked_at_s)
        manifest = await self._verify(answer.signed_manifest)
        if manifest.key != key:
            raise RefusedError(Reason.MALFORMED, f"{name} gave the manifest of {manifest.key} for {key}")
        return manifest, answer.signed_manifest

    def _answered(self, took_s: float) -> None:
        self.link = self.link.answered(took_s)

    async def _verify(self, signed: bytes) -> Manifest:
        return await asyncio.to_thread(
            verify_signed, signed, public_key=self._public_key, run_id=self._run_id
        )

    async def _run_lane(self, transfer: Transfer, *, lanes: int) -> None:
        queue = DecodeQueue(
            transfer,
            sources=self._sources,
            metrics=self._metrics,
            most_attempts=self._limits.attempts_per_damaged_frame,
        )
        try:
            await self._read_ranges(transfer, queue, lanes=lanes)
        finally:
            await queue.end()

    async def _read_ranges(self, transfer: Transfer, queue: DecodeQueue, *, lanes: int) -> None:
        attempts = self._attempts()
        bytes_per_s: float | None = None
        asked_bytes = 0
        while True:
            transfer.changed.clear()
            queue.look()
            if transfer.is_over:
                return
            names = self._names(transfer.key)
            if bytes_per_s is None:
                bytes_per_s = max((self._sources.bytes_per_s(name) or 0.0 for name in names), default=0.0)
            enough_bytes = self._enough_bytes(transfer, bytes_per_s, asked_bytes, lanes=lanes)
            span = transfer.take(enough_bytes) or self._take_over(transfer, names)
            if span is None:
                await wait_at_most(transfer.changed, _WORTH_TAKING_S)
                continue
            asked_bytes = span.left_bytes(transfer.manifest)
            if span.stream is None:
                others = [name for name in names if name not in span.avoid]
                span.source = self._sources.choose(others or names)
            source = span.source
            try:
                bytes_per_s = await self._read(transfer, span, queue, attempts)
                transfer.leave(span)
            except DamagedFrameError:
                raise
            except (ConnectionLost, RefusedError) as error:
                transfer.leave(span)
                if span.frames:  # else it was taken over
                    span.avoid = frozenset({source})
                    transfer.give_back(span)
                    await self._blame(source, transfer.key, error, attempts)

    def _enough_bytes(self, transfer: Transfer, bytes_per_s: float, asked_bytes: int, *, lanes: int) -> int:
        """Give how much a lane of such goodput should ask for after ``asked_bytes``."""
        if lanes == 1:
            return self._limits.range_bytes
        if not bytes_per_s:
            return self._limits.part_bytes  # so little that the first frames are whole very soon
        wanted_bytes = min(int(_RANGE_S * bytes_per_s), self._limits.range_bytes)
        # At the end half as much, but no less: that would be waiting for answers rather than reading.
        share_bytes = max(transfer.unasked.left_bytes // (_RANGES_PER_LANE * lanes), wanted_bytes // 2)
        enough_bytes = max(min(wanted_bytes, share_bytes), self._limits.least_range_bytes)
        return min(enough_bytes, _GROWTH * asked_bytes) if asked_bytes else enough_bytes

    def _take_over(self, transfer: Transfer, names: Iterable[str]) -> Range | None:
        """Take a range from a lane that would take longer with it than another source; None: leave them."""
        now = time.monotonic()
        for slow in transfer.reading:
            known = (self._sources.bytes_per_s(name) for name in names if name != slow.source)
            best = max((rate for rate in known if rate), default=None)
            read_s = now - slow.started_s
            may_be_taken = slow.frames and slow.deadline is not None and slow.times_taken < _MOST_TAKEOVERS
            if best is None or not may_be_taken or read_s < _WORTH_TAKING_S:
                continue
            left_bytes = slow.left_bytes(transfer.manifest)
            here_s, there_s = left_bytes * read_s / max(slow.read_bytes, 1), left_bytes / best
            if here_s - there_s > _WORTH_TAKING_S and there_s < here_s / 2:
                return transfer.take_over(slow)
        return None

    async def _blame(
        self, name: str, key: ArtifactKey, error: ConnectionLost | RefusedError, attempts: Attempts
    ) -> None:
        """Set a source aside; return when it is time to try again.

        Raises:
            ConnectionLost, RefusedError: ``error``, if trying again will not help.
        """
        passes = not isinstance(error, RefusedError) or error.reason.recovery is Recovery.WAIT
        if isinstance(error, RefusedError) and error.reason is Reason.UNKNOWN_VERSION:
            self._sources.lacks(name, key)
        elif passes:
            fault = Fault.LIED if isinstance(error, LyingSourceError) else Fault.LOST
            self._sources.fault(name, fault, str(error))
        else:
            self._sources.fault(name, Fault.LIED, str(error))
        has_other = any(other != name for other in self._sources.candidates(key))
        await attempts.wait_after(error, passes=passes or has_other, at_once=self._sources.has_standing(key))

    async def _read(self, transfer: Transfer, span: Range, queue: DecodeQueue, attempts: Attempts) -> float:
        """Read one stream, and give its goodput, bytes a second.

        What arrived is gone from the range, or in its ``partial``, however it ends.
        """
        request = policy_pb2.FetchFramesRequest(
            key=artifact_key_to_wire(transfer.key),
            frames=span.frames,
            first_offset_bytes=span.next_bytes,
            end_offset_bytes=span.end_bytes,
        )
        span.started_s, span.read_bytes = time.monotonic(), 0
        pushed, span.stream = span.stream, None
        with self._sources.lane(span.source) as stub:
            stream: ChunkStream = pushed or stub.FetchFrames(request)
            try:
                while span.frames:
                    chunk = await self._next(stream, span)
                    data = chunk.data  # each look at the field is a copy
                    self._metrics.count_received(transfer.key, len(data))
                    self.progress.arrived(len(data), now=time.monotonic())
                    taken = span.take(chunk.frame, chunk.offset_bytes, data, transfer.manifest)
                    attempts.reset()
                    span.read_bytes += len(data)
                    if arrived := transfer.whole(taken):
                        await queue.begin(arrived)
            finally:
                stream.cancel()
                took_s = time.monotonic() - span.started_s
                if span.read_bytes and pushed is None:  # what was pushed may have waited here for long
                    self._sources.delivered(span.source, span.read_bytes, took_s=took_s)
        return span.read_bytes / max(took_s, 1e-6) if pushed is None else 0.0

    async def _next(self, stream: ChunkStream, span: Range) -> Chunk:
        try:
            with classified():
                async with asyncio.timeout(self._limits.stall_s) as span.deadline:
                    message = await stream.read()
        except TimeoutError:
            raise ConnectionLost(f"no byte for {self._limits.stall_s:g} s") from None
        finally:
            span.deadline = None
        if not span.frames:
            raise ConnectionLost("the range was taken over")
        if not isinstance(message, policy_pb2.FetchFramesResponse | policy_pb2.AwaitArtifactResponse):
            raise ConnectionLost("the stream ended before the last frame")
        return message
