"""Fetches manifests and frames of artifacts: from many sources at once, resumable, each frame verified.

    wanted frames -> ranges -> lanes, each reading one range from one source at a time -> payloads

Attempts are bounded where nothing is gained by them: in a row without one byte of progress, and per
damaged frame. There is no deadline on a whole transfer: a slow link is not an error.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Final, Protocol

from heterorl.v1 import policy_pb2
from node.errors import Reason, RefusedError
from node.policy import Artifact, ArtifactKey
from node.rpc.channel import Backoff, ConnectionLost, call
from node.telemetry.transfer_metrics import TransferMetrics
from node.waits import side_by_side
from node.weights.assembly.apply import WrongBaseError
from node.weights.format.manifest import Manifest, verify_signed
from node.weights.planning.link_time import FetchProgress, Link
from node.weights.transfer.artifact_prefetch import ArtifactPrefetch
from node.weights.transfer.lane import FetchLimits, Lane, NotTakenError
from node.weights.transfer.payload_order import fetch_order
from node.weights.transfer.ranges import PausedTransfers, PutFrame, Transfer, Unasked
from node.weights.transfer.sources import Attempts, Sources
from node.wire.mapping import to_wire

_MANIFEST_TIMEOUT_S: Final = 60.0


class Assembly(Protocol):
    """A version being assembled. Called in threads."""

    def take_held(self) -> tuple[int, ...]:
        """Use what the base has already; return the unchanged frames that are wrong there."""

    def missing(self) -> tuple[int, ...]:
        """Return the frames whose payload is still needed."""

    def put(self, frame: int, payload: bytes) -> None:
        """Apply a payload. Raises DamagedFrameError or WrongBaseError."""


@dataclass(eq=False)
class Fetcher:
    """Fetches one artifact after the other, and measures the link by them."""

    sources: Sources
    _: KW_ONLY
    public_key: bytes
    run_id: str
    metrics: TransferMetrics
    random: Callable[[], float]
    limits: FetchLimits = field(default_factory=FetchLimits)
    link: Link = field(default_factory=Link, init=False)
    """As measured by what was fetched."""
    progress: FetchProgress = field(default_factory=lambda: FetchProgress(time.monotonic()), init=False)
    """Progress of the fetch under way, or of the last one."""
    _prefetch: ArtifactPrefetch | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._paused = PausedTransfers(self.metrics)

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
            sources=self.sources,
            verify=self._verify,
            answered=self._answered,
            random=self.random,
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
        manifest = await self._prefetch.answer(patience_s=patience_s)
        return None if manifest is None else manifest.artifact

    def give_up(self) -> None:
        """Record that the fetch under way is dropped: a link silent for so long may be that long."""
        self.link = self.link.silent(self.progress.silence_s(time.monotonic()))

    async def manifest(self, key: ArtifactKey) -> Manifest:
        """Return the manifest of an artifact, its signature and run verified.

        Raises RefusedError: UNKNOWN_VERSION; BAD_SIGNATURE and others of ``verify_signed``; MALFORMED, if it
        is the manifest of another artifact. ConnectionLost: after ``FetchLimits.attempts``.
        """
        self.progress = FetchProgress(time.monotonic())
        manifest = None
        if self._prefetch is not None and key.version > self._prefetch.held_version:
            manifest = await self._prefetch.answer()
        if manifest is None or manifest.key != key:
            manifest = await self._asked_manifest(key)
        self.sources.signed(manifest)
        self.progress.signed(manifest.size_bytes, now=time.monotonic())
        return manifest

    async def fetch(self, manifest: Manifest, frames: Iterable[int], put: PutFrame) -> None:
        """Hand each frame's payload to ``put``, in any order, several at a time.

        Raises DamagedFrameError: a frame failed its digest ``attempts_per_damaged_frame`` times.
        RefusedError: the sources refuse for a reason that does not pass; UNKNOWN_VERSION: plan again.
        ConnectionLost: after ``attempts`` in a row without a byte.
        """
        connections = self.sources.connections(self._reading(manifest.key).names())
        lanes = min(self.limits.streams * connections, self.limits.most_streams)
        frames = [frame for frame in frames if manifest.frames[frame].payload_bytes]
        transfer = self._paused.take(manifest, frames, put)
        transfer = transfer or self._begun(manifest, frames, put, lanes=lanes)
        left_bytes = transfer.unasked.left_bytes
        most_ranges = len(transfer.waiting) + -(-left_bytes // self.limits.least_range_bytes)
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

    async def fetch_into(self, assembly: Assembly, manifest: Manifest) -> None:
        """Fetch the frames that ``assembly`` lacks of the manifest's version.

        Raises RefusedError: WRONG_BASE: the base is not what it claims to be, once every other frame is
        fetched; others as ``fetch``. ConnectionLost: as ``fetch``.
        """
        wrong = set(await asyncio.to_thread(assembly.take_held))

        def put(frame: int, payload: bytes) -> None:
            started_s = time.perf_counter()
            try:
                assembly.put(frame, payload)
            except WrongBaseError:
                wrong.add(frame)
            else:
                codec = manifest.frames[frame].codec.name.lower()
                self.metrics.count_applied_frame(codec, took_s=time.perf_counter() - started_s)

        started_s = time.perf_counter()
        await self.fetch(manifest, [frame for frame in assembly.missing() if frame not in wrong], put)
        self.metrics.count_fetch(manifest.key, took_s=time.perf_counter() - started_s)
        if wrong:
            raise RefusedError(
                Reason.WRONG_BASE,
                f"{len(wrong)} held frames are not what version {manifest.version} needs",
                fix="start from a keyframe or from the public base model",
            )

    def _lane(self, transfer: Transfer, *, lanes: int) -> Lane:
        return Lane(
            transfer,
            sources=self.sources,
            attempts=self._reading(transfer.key),
            arrived=lambda size_bytes: self.progress.arrived(size_bytes, now=time.monotonic()),
            metrics=self.metrics,
            limits=self.limits,
            lanes=lanes,
        )

    def _begun(self, manifest: Manifest, frames: Sequence[int], put: PutFrame, *, lanes: int) -> Transfer:
        pushed = None if self._prefetch is None else self._prefetch.take(manifest)
        coming = set() if pushed is None else set(pushed.frames)
        if pushed is not None and not (coming and coming.issubset(frames)):
            pushed.cancel_stream()
            pushed, coming = None, set()
        rest = [frame for frame in frames if frame not in coming]
        unasked = Unasked(
            manifest,
            fetch_order(manifest, rest) if lanes > 1 else rest,
            part_bytes=self.limits.part_bytes if lanes > 1 else None,
        )
        return Transfer(manifest, put, deque() if pushed is None else deque([pushed]), unasked)

    def _reading(self, key: ArtifactKey) -> Attempts:
        return self._attempts(key, self.sources.readable)

    def _attempts(self, key: ArtifactKey, candidates: Callable[[ArtifactKey], tuple[str, ...]]) -> Attempts:
        return Attempts(
            key,
            sources=self.sources,
            candidates=candidates,
            per_source=self.limits.attempts,
            backoff=Backoff(self.random, cap_s=self.limits.longest_wait_s),
        )

    async def _asked_manifest(self, key: ArtifactKey) -> Manifest:
        attempts = self._attempts(key, self.sources.candidates)
        while True:
            name = self.sources.scores.choose(attempts.names())
            try:
                return await self._manifest_from(name, key)
            except (ConnectionLost, RefusedError) as error:
                await attempts.wait_after(name, error)

    async def _manifest_from(self, name: str, key: ArtifactKey) -> Manifest:
        request = policy_pb2.GetManifestRequest(key=to_wire(policy_pb2.ArtifactKey, key))
        asked_at_s = time.monotonic()
        try:
            with self.sources.lane(name) as stub:
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
        return await asyncio.to_thread(verify_signed, signed, public_key=self.public_key, run_id=self.run_id)
