"""Fetches manifests and frames of artifacts: from many sources at once, resumable, each frame verified.

    what comes next: chosen by a source, else the first artifact of one's own cheapest path
    wanted frames -> ranges -> lanes, each reading one range from one source at a time -> payloads

A fetch that was begun is finished, also where a cheaper way comes up meanwhile: it leads to something newer
than what is held, and the next one is chosen when it is asked for. Attempts are bounded where nothing is
gained by them: in a row without one byte of progress, and per damaged frame. There is no deadline on a whole
transfer: a slow link is not an error.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Final, Protocol, TypeVar

from heterorl.v1 import policy_pb2
from node.errors import Reason, RefusedError
from node.rpc.call_ends import ConnectionLost, call
from node.system.backoff import Backoff
from node.system.waits import side_by_side
from node.telemetry.transfer_metrics import TransferMetrics
from node.values.policy import Artifact, ArtifactKey
from node.weights.assembly.apply import WrongBaseError
from node.weights.format.manifest import Manifest, verify_signed
from node.weights.planning.link_time import Link
from node.weights.transfer.artifact_prefetch import ArtifactPrefetch
from node.weights.transfer.attempts import Attempts
from node.weights.transfer.lane import FetchLimits, Lane, NotTakenError
from node.weights.transfer.payload_order import fetch_order
from node.weights.transfer.ranges import PutFrame, Transfer, Unasked
from node.weights.transfer.sources import Sources
from node.wire.mapping import to_wire

_MANIFEST_TIMEOUT_S: Final = 60.0

_SLOW_ROUND_TRIPS: Final = 4
"""Round trips that a range may take on a long line: one of asking, and TCP's growth."""


class Position(Protocol):
    """Where a follower of the head is: a sampler with what it holds, a relay with what it stores."""

    @property
    def held_version(self) -> int:
        """The newest version it has, which the next delta may start from."""

    @property
    def lets_choose(self) -> bool:
        """Whether a source may choose what to send; False: the way is not the one of everybody else."""

    def path(self) -> Sequence[Artifact]:
        """Return the cheapest way to the head in bytes; empty where there is none, or none is needed."""

    def next_artifact(self) -> Artifact | None:
        """Return what to fetch by name: the first of ``path``, or something less urgent; None: nothing."""

    def can_start(self, key: ArtifactKey) -> bool:
        """Whether an artifact makes something newer than what is held, of what is here."""


class Assembly(Protocol):
    """A version being assembled. Called in threads."""

    def take_held(self) -> tuple[int, ...]:
        """Use what the base has already; return the unchanged frames that are wrong there."""

    def missing(self) -> tuple[int, ...]:
        """Return the frames whose payload is still needed."""

    def put(self, frame: int, payload: bytes) -> None:
        """Apply a payload. Raises DamagedFrameError or WrongBaseError."""


A = TypeVar("A", bound=Assembly)


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
    _prefetch: ArtifactPrefetch | None = field(default=None, init=False)
    _transfer: Transfer | None = field(default=None, init=False)
    _lane_bytes_per_s: float = field(default=0.0, init=False)
    """Goodput of the best lane of the last fetch."""

    def prefetch(self, held_version: int, tasks: asyncio.TaskGroup) -> None:
        """Ask for what comes after a version, in a task of ``tasks``, unless it is asked for already.

        ``manifest`` and ``fetch`` then find it here, or on its way. An earlier question is dropped.
        """
        if self._prefetch is not None:
            if self._prefetch.held_version == held_version and not self._prefetch.is_spent:
                return
            self._prefetch.cancel()
        self._prefetch = ArtifactPrefetch(
            held_version,
            artifact_cost_bytes=self.link.artifact_cost_bytes,
            sources=self.sources,
            verify=self._verify,
            answered=self._answered,
            random=self.random,
            tasks=tasks,
        )

    async def next_artifact(
        self, look: Callable[[], Awaitable[Position]], tasks: asyncio.TaskGroup
    ) -> Artifact | None:
        """Return what to fetch now; None: nothing. ``look`` says where the follower is now.

        On the way to the head the source chooses, and sends all of it in one round trip; what does not come
        in time, or cannot be used, is asked for by name.
        """
        position = await look()
        if not (position.lets_choose and position.path()):
            return position.next_artifact()
        self.prefetch(position.held_version, tasks)
        assert self._prefetch is not None
        chosen = await self._prefetch.answer(round_trip_s=self.link.round_trip_s)
        position = await look()
        if chosen is not None and position.can_start(chosen.key):
            return chosen.artifact
        return position.next_artifact()

    async def manifest(self, key: ArtifactKey) -> Manifest:
        """Return the manifest of an artifact, its signature and run verified.

        Raises RefusedError: UNKNOWN_VERSION; BAD_SIGNATURE and others of ``verify_signed``; MALFORMED, if it
        is the manifest of another artifact. ConnectionLost: after ``FetchLimits.attempts``.
        """
        manifest = None if self._prefetch is None else self._prefetch.manifest
        if manifest is None or manifest.key != key:
            manifest = await self._asked_manifest(key)
        self.sources.signed(manifest)
        return manifest

    async def fetch(self, manifest: Manifest, frames: Iterable[int], put: PutFrame) -> bool:
        """Hand each frame's payload to ``put``, in any order, several at a time.

        Returns whether that was all of them: after ``wind_up``, those that were not begun are left out.

        Raises DamagedFrameError: a frame failed its digest ``attempts_per_damaged_frame`` times.
        RefusedError: the sources refuse for a reason that does not pass; UNKNOWN_VERSION: plan again.
        ConnectionLost: after ``attempts`` in a row without a byte.
        """
        names = self._reading(manifest.key).names()
        lanes = min(self.limits.streams * self.sources.connections(names), self.limits.most_streams)
        frames = [frame for frame in frames if manifest.frames[frame].payload_bytes]
        self._transfer = transfer = self._begun(manifest, frames, put, lanes=lanes)
        most_ranges = len(transfer.waiting) + -(-transfer.unasked.left_bytes // self.limits.least_range_bytes)
        rate = self._lane_bytes_per_s if len(names) == 1 else 0.0
        readers = [self._lane(transfer, lanes=lanes, rate=rate) for _ in range(min(lanes, most_ranges))]
        try:
            async with side_by_side() as group:
                for lane in readers:
                    group.create_task(lane.run())
        except NotTakenError as failure:
            raise failure.refusal from None
        finally:
            self._transfer = None
            transfer.close()
            self._lane_bytes_per_s = max((lane.bytes_per_s for lane in readers), default=0.0)
            took_s = transfer.last_at_s - transfer.first_at_s
            self.link = self.link.carried(transfer.arrived_bytes, took_s=took_s)
        return not transfer.is_wound_up

    def wind_up(self) -> None:
        """End the fetch under way once the frames begun are whole: something else is more urgent."""
        if self._transfer is not None:
            self._transfer.wind_up()

    async def fetch_into(self, begin: Callable[[], A], manifest: Manifest) -> A:
        """Return the assembly that ``begin`` makes in a thread, with all frames of the manifest's version.

        Raises RefusedError: WRONG_BASE: the base is not what it claims to be, once every other frame is
        fetched; others as ``begin`` and ``fetch``. ConnectionLost: as ``fetch``.
        """

        def take_held() -> tuple[A, set[int]]:
            assembly = begin()
            return assembly, {*assembly.take_held()}

        assembly, wrong = await asyncio.to_thread(take_held)

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
        return assembly

    def _lane(self, transfer: Transfer, *, lanes: int, rate: float) -> Lane:
        return Lane(
            transfer,
            sources=self.sources,
            attempts=self._reading(transfer.key),
            metrics=self.metrics,
            limits=self.limits,
            lanes=lanes,
            slow_s=max(self.limits.slow_s, _SLOW_ROUND_TRIPS * self.link.round_trip_s),
            bytes_per_s=rate,
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
            name = self.sources.turns.next_of(attempts.names())
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
