"""Follows the head: keeps the engine on the newest policy version, while it generates.

    announcement --> look --> fetch, assemble, verify, remember --> apply between decode steps
         ^                       |                                       |
         |                       `-- the words held are doubted: drop    |
         `---------------------------------------------------------------'

``served_policy`` says what is due. ``way_to_head`` and the source that is asked decide what to fetch next;
``held_version`` changes the live words. Every version on the way to the head is verified and applied: over a
slow link, a version nearer to the head is worth having.
"""

import asyncio
import contextlib
import enum
import logging
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import ClassVar, Final

from node.errors import Reason, RefusedError
from node.rpc.call_ends import ConnectionLost
from node.system.backoff import Backoff
from node.system.clock import Clock
from node.system.waits import run_until, wait_at_most, while_it_may
from node.telemetry.metrics import NodeMetrics
from node.telemetry.transfer_metrics import TransferMetrics
from node.values.policy import Announcement, Artifact, ArtifactKey
from node.weights.transfer.fetcher import Fetcher
from sampler.engines.restartable_engine import EngineEndedError
from sampler.metrics import SamplerMetrics
from sampler.served_policy import Command, Event, State
from sampler.versions.held_version import HeldVersion
from sampler.versions.version_assembly import VersionAssembly
from sampler.versions.way_to_head import FetchPlan, Starvation

logger = logging.getLogger(__name__)

FETCH: Final = "policy fetch"
"""Name of the wait for a fetch."""

LOOK_AGAIN_S: Final = 1.0
"""Longest wait without looking again at what is due."""

SCRUB_EVERY_S: Final = 2.0
"""From one turn of the memory scrub to the next."""


class DroppedFetch(enum.StrEnum):
    """Why a fetch ended without a version. Closed: the ``reason`` label of dropped fetches."""

    DOUBT = "doubt"
    """The held version may be damaged and is checked first."""
    LOST = "lost"
    """The connection was lost, or the sources do not answer."""
    REFUSED = "refused"
    """The sources no longer have it, or what they sent cannot be used."""


@dataclass(eq=False)
class PolicySync:
    """A service, ready once it has something to serve: it keeps ``held`` on the newest version."""

    fetcher: Fetcher
    held: HeldVersion
    _: KW_ONLY
    watch: Callable[[], AsyncIterator[Announcement]]
    """Yields announcements for as long as anyone listens."""
    transfer_metrics: TransferMetrics
    metrics: SamplerMetrics
    node_metrics: NodeMetrics
    clock: Clock
    name: ClassVar = "policy sync"
    _announcement: Announcement | None = field(default=None, init=False)
    _unusable: frozenset[ArtifactKey] = field(default=frozenset(), init=False)
    _misfit: ArtifactKey | None = field(default=None, init=False)
    """The last artifact that did not fit the words held; it casts doubt on them once."""
    _assembly: VersionAssembly | None = field(default=None, init=False)
    """Verified, and not applied."""

    def __post_init__(self) -> None:
        self._policy = self.held.policy
        self._starvation = Starvation()
        self._backoff = Backoff(random.random)
        self._changed = asyncio.Event()
        self._policy.listen(lambda _: self._changed.set())

    def starving_s(self) -> float:
        """Return for how long newer versions have been available and none was taken."""
        return self._starvation.for_s(self.clock.monotonic())

    def distance(self, *, bound_versions: int) -> str:
        """Describe, in at most 100 characters, how far from the head the link keeps this sampler."""
        behind, round_trip_s = self._plan.behind_versions, self.fetcher.link.round_trip_s
        return f"{behind} behind over a round trip of {round_trip_s:.2g} s, bound {bound_versions}"

    def doubt(self) -> None:
        """Sample no more from what is held until it was compared with what was verified."""
        if self._policy.served is not None:
            self.metrics.repairs.inc()
            self._policy.note(Event.DAMAGE)

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Follow the head until ``stopping``.

        Raises:
            StartupError: what is on disk cannot be used.
            RefusedError: no source will ever announce anything to this peer; BASE_MISMATCH.
        """
        await self.held.load()
        ready()
        await run_until(stopping, self._follow())

    async def _follow(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            tasks.create_task(self._scrub())
            while True:
                self._changed.clear()
                match self._policy.command(now=self.clock.monotonic()):
                    case Command.SERVE:
                        await self._serve()
                    case Command.RESTORE:
                        await self._restore()
                    case Command.APPLY:
                        await self._apply()
                    case Command.LOOK:
                        await self._look(tasks)
                    case _:
                        await wait_at_most(self._changed, LOOK_AGAIN_S)

    async def _listen(self) -> None:
        async for announcement in self.watch():
            try:
                # It is not signed, so that it only says what may be asked for.
                mark = self.held.saved.mark
                mark.check(learner_epoch=announcement.learner_epoch, version=announcement.head)
            except RefusedError as refused:
                self.node_metrics.count_refusal(service="PolicyService", reason=refused.reason)
                logger.warning("announcement refused", extra={"detail": str(refused)})
            else:
                self._announcement, self._unusable = announcement, frozenset()
                self._note_distance(is_taken=False)
            self._changed.set()

    async def _scrub(self) -> None:
        while True:
            await asyncio.sleep(SCRUB_EVERY_S)
            frame = await self.held.check_next_frames()
            if frame is not None:
                logger.error("memory damaged", extra={"version": self._policy.held.number, "frame": frame})
                self.doubt()

    @property
    def _plan(self) -> FetchPlan:
        return FetchPlan(self._policy.held, self._announcement, self._unusable, self._policy.stop_from)

    async def _position(self) -> FetchPlan:
        return self._plan

    def _note_distance(self, *, is_taken: bool) -> None:
        behind, now = self._plan.behind_versions, self.clock.monotonic()
        self._starvation.note(behind_versions=behind, is_taken=is_taken, now=now)

    async def _look(self, tasks: asyncio.TaskGroup) -> None:
        """Fetch a newer version, or wait until there may be one."""
        with self.node_metrics.waiting(FETCH):
            artifact = await self.fetcher.next_artifact(self._position, tasks)
        if artifact is not None:
            await self._fetch(artifact)
        elif self._unusable:
            await self._backoff.wait(self._changed)
            self._unusable = frozenset()
        else:
            self.fetcher.prefetch(self._policy.held.number, tasks)
            while not self._changed.is_set() and self._plan.next_artifact() is None:
                await wait_at_most(self._changed, LOOK_AGAIN_S)

    async def _fetch(self, artifact: Artifact) -> None:
        self._policy.note(Event.FETCH)
        if self._policy.state is not State.FETCHING:
            return  # It was doubted or lost meanwhile.
        fields = {"artifact": str(artifact.key)}
        try:
            with self.node_metrics.waiting(FETCH):
                assembly = await while_it_may(
                    self._assembled(artifact), changed=self._changed, may_go_on=self._is_fetching
                )
            if assembly is not None:
                await asyncio.to_thread(self.held.finish, assembly)
        except ConnectionLost as lost:
            self._drop(DroppedFetch.LOST)
            logger.info("fetch interrupted", extra=fields | {"detail": str(lost)})
            await self._backoff.wait(self._changed)
        except RefusedError as refused:
            self._refuse(artifact.key, refused)
        else:
            self._assembly = assembly
            if assembly is not None:
                self._policy.note(Event.VERIFIED)
            else:
                self._drop(DroppedFetch.DOUBT)
                logger.info("fetch dropped", extra=fields | {"reason": DroppedFetch.DOUBT.value})

    async def _is_fetching(self) -> bool:
        return self._policy.state is State.FETCHING

    async def _assembled(self, artifact: Artifact) -> VersionAssembly:
        manifest = await self.fetcher.manifest(artifact.key)
        return await self.fetcher.fetch_into(partial(self.held.begin, manifest), manifest)

    async def _serve(self) -> None:
        with contextlib.suppress(RefusedError):  # the engine failed meanwhile
            await self.held.serve()

    async def _apply(self) -> None:
        assembly, self._assembly = self._assembly, None
        assert assembly is not None, "a verified version was assembled"
        try:
            await self.held.apply(assembly)
        except RefusedError as refused:
            self.node_metrics.count_refusal(service="PolicyService", reason=refused.reason)
            fields = {"version": assembly.manifest.version, "detail": str(refused)}
            logger.warning("version not applied, going back to the disk", extra=fields)
            return
        self._note_distance(is_taken=True)
        self._backoff.reset()
        await self.held.save()

    async def _restore(self) -> None:
        if self._assembly is not None:
            self._assembly = None
            self._drop(DroppedFetch.DOUBT)
        try:
            damaged = await self.held.restore()
        except EngineEndedError:
            return  # It is loaded again, a few times at most.
        self.transfer_metrics.count_repaired_frames(damaged)
        if damaged:  # the artifact that did not fit may fit now
            self._unusable, self._misfit = frozenset(), None
        fields = {"version": self._policy.held.number, "damaged_frames": damaged}
        logger.warning("held policy restored", extra=fields)

    def _refuse(self, key: ArtifactKey, refused: RefusedError) -> None:
        if refused.reason is Reason.BASE_MISMATCH:
            raise refused
        self._drop(DroppedFetch.REFUSED)
        self.node_metrics.count_refusal(service="PolicyService", reason=refused.reason)
        logger.warning("artifact not usable", extra={"artifact": str(key), "detail": str(refused)})
        self._unusable |= {key}
        if refused.reason is Reason.WRONG_BASE and key != self._misfit:
            self._misfit = key
            self.doubt()

    def _drop(self, reason: DroppedFetch) -> None:
        self._policy.note(Event.DROP)
        self.metrics.dropped_fetches.labels(reason).inc()
