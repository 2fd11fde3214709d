"""Fetches manifests and frames of artifacts: from many sources at once, resumable, each frame verified.

    wanted frames -> ranges -> lanes, each reading one range from one source at a time -> payloads

Attempts are bounded where nothing is gained by them: in a row without one byte of progress, and per
damaged frame. There is no deadline on a whole transfer: a slow link is not an error.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from heterorl.v1 import policy_pb2
from node import limits
from node.errors import Reason, RefusedError
from node.policy import Artifact, ArtifactKey
from node.rpc.channel import Backoff, ConnectionLost, call
from node.telemetry.transfer_metrics import TransferMetrics
from node.waits import side_by_side
from node.weights.format.manifest import Manifest, verify_signed
from node.weights.planning.link_time import Link, Progress
from node.weights.transfer.artifact_prefetch import ArtifactPrefetch
from node.weights.transfer.attempts import Attempts
from node.weights.transfer.lane import FetchLimits, Lane, NotTakenError
from node.weights.transfer.payload_order import fetch_order, pushed_frames
from node.weights.transfer.ranges import PausedTransfers, PutFrame, Range, Transfer, Unasked
from node.weights.transfer.sources import Sources
from node.wire.mapping import to_wire

_MANIFEST_TIMEOUT_S: Final = 60.0


class Fetcher:
    """Fetches one artifact after the other, and measures the link by them."""

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
        """Progress of the fetch under way, or of the last one."""
        self._paused = PausedTransfers(metrics)

    def prefetch(self, held_version: int, tasks: asyncio.TaskGroup, *, artifact_cost_bytes: int = 0) -> None:
        """Ask in advance for what comes after a version, in a task of ``tasks``, instead of an earlier one.

        ``manifest`` and ``fetch`` then find it here, or on its way. The source chooses by
        ``artifact_cost_bytes``, as ``cheapest_chain.plan_catch_up`` does.
        """
        if self._prefetch is not None:
            if self._prefetch.held_version == held_version and self._prefetch.is_waiting:
                return
            self._prefetch.cancel()
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
        """Return what a source chooses to send to the holder of a version, all of it in one round trip.

        It was asked for in advance, or is asked for now; None: nothing comes in time.
        """
        prefetch = self._prefetch
        if prefetch is None or prefetch.held_version != held_version or prefetch.is_spent:
            self.prefetch(held_version, tasks, artifact_cost_bytes=self.link.artifact_cost_bytes)
        assert self._prefetch is not None
        return await self._prefetch.artifact(patience_s=patience_s)

    def give_up(self) -> None:
        """Record that the fetch under way is dropped: a link silent for so long may be that long."""
        self.link = self.link.silent(self.progress.silence_s(time.monotonic()))

    async def manifest(self, key: ArtifactKey) -> Manifest:
        """Return the manifest of an artifact, its signature and run verified.

        Raises RefusedError: UNKNOWN_VERSION; BAD_SIGNATURE and others of ``verify_signed``; MALFORMED, if it
        is the manifest of another artifact. ConnectionLost: after ``FetchLimits.attempts``.
        """
        self.progress = Progress(time.monotonic())
        pushed = None if self._prefetch is None else await self._prefetch.answer(key)
        manifest = await self._asked_manifest(key) if pushed is None else pushed.manifest
        self._sources.signed(manifest)
        self.progress.signed(manifest.size_bytes, now=time.monotonic())
        return manifest

    async def fetch(self, manifest: Manifest, frames: Iterable[int], put: PutFrame) -> None:
        """Hand each frame's payload to ``put``, in any order, several at a time.

        Raises DamagedFrameError: a frame failed its digest ``attempts_per_damaged_frame`` times.
        RefusedError: the sources refuse for a reason that does not pass; UNKNOWN_VERSION: plan again.
        ConnectionLost: after ``attempts`` in a row without a byte.
        """
        connections = self._sources.connections(self._attempts(manifest.key).names())
        lanes = min(self._limits.streams * connections, self._limits.most_streams)
        frames = [frame for frame in frames if manifest.frames[frame].payload_bytes]
        transfer = self._paused.take(manifest, frames, put)
        transfer = transfer or self._begun(manifest, frames, put, lanes=lanes)
        left_bytes = transfer.unasked.left_bytes
        most_ranges = len(transfer.waiting) + -(-left_bytes // self._limits.least_range_bytes)
        try:
            async with side_by_side() as group:
                for _ in range(min(lanes, most_ranges)):
                    group.create_task(self._lane(transfer, lanes=lanes).run())
        except NotTakenError as failure:
            raise failure.refusal from None
        finally:
            transfer.pause()
            if not transfer.is_over:
                self._paused.keep(transfer)
            took_s = self.progress.last_at_s - self.progress.first_at_s
            self.link = self.link.carried(self.progress.arrived_bytes, took_s=took_s)

    def _lane(self, transfer: Transfer, *, lanes: int) -> Lane:
        return Lane(
            transfer,
            sources=self._sources,
            attempts=self._attempts(transfer.key),
            arrived=lambda size_bytes: self.progress.arrived(size_bytes, now=time.monotonic()),
            metrics=self._metrics,
            limits=self._limits,
            lanes=lanes,
        )

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
        """Return the frames that are on their way, if all of them are wanted."""
        pushed = None if self._prefetch is None else self._prefetch.take(manifest)
        if pushed is None:
            return deque()
        cost_bytes = pushed.artifact_cost_bytes
        coming = pushed_frames(manifest, most_bytes=limits.PUSH_BYTES, artifact_cost_bytes=cost_bytes)
        if not coming or not set(coming).issubset(frames):
            pushed.stream.cancel()
            return deque()
        return deque([Range(deque(coming), source=pushed.source, stream=pushed.stream)])

    def _attempts(self, key: ArtifactKey) -> Attempts:
        backoff = Backoff(self._random, cap_s=self._limits.longest_wait_s)
        return Attempts(key, sources=self._sources, per_source=self._limits.attempts, backoff=backoff)

    async def _asked_manifest(self, key: ArtifactKey) -> Manifest:
        attempts = self._attempts(key)
        while True:
            name = self._sources.scores.choose(attempts.names())
            try:
                return await self._manifest_from(name, key)
            except (ConnectionLost, RefusedError) as error:
                await attempts.wait_after(name, error)

    async def _manifest_from(self, name: str, key: ArtifactKey) -> Manifest:
        request = policy_pb2.GetManifestRequest(key=to_wire(policy_pb2.ArtifactKey, key))
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
            raise RefusedError(Reason.MALFORMED, f"{name} sent the manifest of {manifest.key} for {key}")
        return manifest

    def _answered(self, took_s: float) -> None:
        self.link = self.link.answered(took_s)

    async def _verify(self, signed: bytes) -> Manifest:
        return await asyncio.to_thread(
            verify_signed, signed, public_key=self._public_key, run_id=self._run_id
        )
