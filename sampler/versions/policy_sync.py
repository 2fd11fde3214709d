"""Follows the head: keeps the engine on the newest policy version, while it generates.

    announcement --> choose --> fetch, assemble, verify --> remember --> apply between decode steps
         ^             |          |                                         |
         |             |          `-- not worth finishing: drop             |
         `-------------+----------------------------------------------------'

``fetch_plan`` and ``node.weights.transfer.head_pursuit`` decide what to fetch next and what to drop.
``held_version`` changes the live words, ``damage_repair`` repairs them. Every version on the way to the head
is verified and applied: over a slow link, a version nearer to the head is worth having.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Final

from node.errors import CountRefusal, Reason, RefusedError
from node.policy import Announcement, Artifact, PolicyVersion
from node.rpc.channel import Backoff, ConnectionLost
from node.telemetry.transfer_metrics import TransferMetrics
from node.waits import run_until, wait_at_most
from node.weights.format.layout import Layout
from node.weights.planning.cheapest_chain import PUBLIC_VERSION
from node.weights.store.high_water import HighWater
from node.weights.transfer.advance import Remedy, fetch_into
from node.weights.transfer.fetcher import Fetcher
from node.weights.transfer.head_pursuit import HeadPursuit
from sampler.metrics import SamplerMetrics
from sampler.stopover import LONGEST_STOP_S, Stopover
from sampler.versions.damage_repair import DamageRepair
from sampler.versions.fetch_plan import FetchPlan
from sampler.versions.held_version import HeldVersion
from sampler.versions.starvation import DroppedFetch, Starvation
from sampler.versions.version_assembly import VersionAssembly

logger = logging.getLogger(__name__)

FETCH: Final = "policy fetch"
"""What a sampler waits for while it fetches."""


class PolicySync:
    """A service, ready once it has something to serve."""

    name = "policy sync"

    def __init__(
        self,
        fetcher: Fetcher,
        *,
        watch: Callable[[], AsyncIterator[Announcement]],
        held: HeldVersion,
        stopover: Stopover,
        layout: Layout,
        found_damage: Callable[[], None],
        transfer_metrics: TransferMetrics,
        metrics: SamplerMetrics,
        count_refusal: CountRefusal,
        waiting: Callable[[str], AbstractContextManager[None]],
        monotonic: Callable[[], float],
        random: Callable[[], float],
    ) -> None:
        """Keep ``held`` on the newest version.

        Args:
            watch: Yields announcements for as long as anyone listens.
            stopover: Where not to go on; call ``look_again`` when a stop has ended.
            found_damage: Called when the live words are not what was verified; it calls ``doubt``.
            waiting: ``NodeMetrics.waiting``.
            random: Draws in [0, 1), for the backoff.
        """
        self._fetcher = fetcher
        self._watch = watch
        self._held = held
        self._stopover = stopover
        self._layout = layout
        self._transfer_metrics = transfer_metrics
        self._metrics = metrics
        self._waiting = waiting
        self._monotonic = monotonic
        self._pursuit = HeadPursuit(fetcher, monotonic=monotonic)
        self._starvation = Starvation()
        self._repair = DamageRepair(
            held, fetcher, layout=layout, transfer_metrics=transfer_metrics, found_damage=found_damage
        )
        self._count_refusal = count_refusal
        self._backoff = Backoff(random)
        self._changed = asyncio.Event()
        self._is_doubted = False
        self._is_lost = False
        self._plan = FetchPlan(PolicyVersion(PUBLIC_VERSION), HighWater())

    def starving_s(self) -> float:
        """Return for how long newer versions have been available and none was taken."""
        return self._starvation.for_s(self._monotonic())

    def distance(self, *, bound_versions: int) -> str:
        """Describe how far this sampler is from the staleness bound."""
        return self._pursuit.distance(self._plan.behind_versions, bound_versions=bound_versions)

    def look_again(self) -> None:
        """Look for something to fetch."""
        self._changed.set()

    def doubt(self) -> None:
        """Compare what is held with what was signed, and repair it."""
        self._is_doubted = True
        self._changed.set()

    def lose(self) -> None:
        """Restore what is held from the disk: the engine was loaded again."""
        self._held.lose()
        self._is_lost = True
        self._changed.set()

    def scrub(self) -> None:
        """Hash some of the live words again, soon."""
        self._repair.scrub()

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Follow the head until ``stopping``.

        Raises:
            StartupError: what is on disk cannot be used.
            RefusedError: no source will ever announce anything to this peer; BASE_MISMATCH.
        """
        await self._held.load()
        self._note_held()
        ready()
        await run_until(stopping, self._follow())

    async def _follow(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            try:
                await self._held.serve()
            except RefusedError:
                if not self._is_lost:
                    raise
            tasks.create_task(self._repair.scrub_when_due())
            while True:
                self._changed.clear()
                if self._is_lost:
                    await self._restore()
                if self._is_doubted:
                    await self._resolve_doubt()
                if self._stopover.holds(self._plan.held_version, now=self._monotonic()):
                    await self._stop()
                    continue
                with self._waiting(FETCH):
                    artifact = await self._pursuit.next_artifact(self._look, tasks)
                self._metrics.round_trip.set(self._fetcher.link.round_trip_s)
                if artifact is not None:
                    await self._advance(artifact)
                elif self._plan.unusable:
                    await self._backoff.wait(self._changed)
                    self._plan = self._plan.reconsidered()
                else:
                    self._fetcher.prefetch(self._held.version.number, tasks)
                    await self._changed.wait()

    async def _listen(self) -> None:
        async for announcement in self._watch():
            try:
                self._plan = self._plan.announced(announcement)
            except RefusedError as refused:
                self._count_refusal(service="PolicyService", reason=refused.reason)
                logger.warning("announcement refused", extra={"detail": str(refused)})
            else:
                self._pursuit.announced(announcement)
                behind = self._plan.behind_versions
                self._starvation.announced(behind_versions=behind, now=self._monotonic())
                self._metrics.versions_behind.set(behind)
            self._changed.set()

    async def _look(self) -> FetchPlan:
        self._log_starvation()
        self._plan = replace(self._plan, stop_from=self._stopover.from_version)
        return self._plan

    async def _advance(self, artifact: Artifact) -> None:
        try:
            with self._waiting(FETCH):
                assembly = await self._pursuit.fetch(
                    artifact,
                    self._fetch(artifact),
                    look=self._look,
                    changed=self._changed,
                    is_interrupted=lambda _: self._is_doubted or self._is_lost,
                )
            if assembly is None:
                is_doubted = self._is_doubted or self._is_lost
                reason = DroppedFetch.DOUBT if is_doubted else DroppedFetch.SUPERSEDED
                self._count_dropped(reason)
                fields = {"artifact": str(artifact.key), "reason": reason.value}
                logger.info("fetch dropped", extra=fields)
                return
            await self._stop()
            if self._is_doubted or self._is_lost:
                self._count_dropped(DroppedFetch.DOUBT)
                return
            await self._take(assembly)
            self._backoff.reset()
        except ConnectionLost as lost:
            self._count_dropped(DroppedFetch.LOST)
            logger.info("fetch interrupted", extra={"artifact": str(artifact.key), "detail": str(lost)})
            await self._backoff.wait(self._changed)
        except RefusedError as refused:
            if refused.reason is Reason.BASE_MISMATCH:
                raise
            self._count_dropped(DroppedFetch.REFUSED)
            self._count_refusal(service="PolicyService", reason=refused.reason)
            fields = {"artifact": str(artifact.key), "detail": str(refused)}
            logger.warning("artifact not usable", extra=fields)
            self._plan = self._plan.failed(artifact.key)

    async def _stop(self) -> None:
        """Wait while the version held is evaluated, unless it has to be repaired."""
        while self._stopover.holds(self._plan.held_version, now=self._monotonic()):
            if self._is_doubted or self._is_lost:
                return
            self._changed.clear()
            await wait_at_most(self._changed, LONGEST_STOP_S)

    async def _fetch(self, artifact: Artifact) -> VersionAssembly:
        manifest = await self._fetcher.manifest(artifact.key)
        assembly = await self._held.begin(manifest, manifest.signed)
        await fetch_into(
            assembly,
            self._fetcher,
            manifest,
            layout=self._layout,
            remedy=self._remedy(),
            metrics=self._transfer_metrics,
        )
        await asyncio.to_thread(assembly.finish)
        return assembly

    async def _take(self, assembly: VersionAssembly) -> None:
        await self._held.remember(assembly)
        try:
            await self._held.apply(assembly)
        except RefusedError as refused:
            self._count_refusal(service="PolicyService", reason=refused.reason)
            fields = {"version": assembly.manifest.version, "detail": str(refused)}
            logger.warning("version not applied, going back to the disk", extra=fields)
            await self._restore()
            return
        self._note_held()
        self._pursuit.took()
        behind = self._plan.behind_versions
        self._starvation.took(behind_versions=behind, now=self._monotonic())
        self._metrics.versions_behind.set(behind)
        await self._held.save()

    async def _restore(self) -> None:
        is_restored = False
        while not is_restored:
            self._is_lost = False
            try:
                await self._held.restore()
                is_restored = True
            except RefusedError:
                # The engine has failed again; it does so a few times at most.
                if not self._is_lost:
                    raise
        self._note_held()

    async def _resolve_doubt(self) -> None:
        self._is_doubted = False
        if await self._repair.repair(self._remedy()):
            self._note_held()
            return
        logger.warning("held policy in doubt, beginning again", extra={"version": self._held.version.number})
        self._plan = self._plan.advanced(self._held.base.version, self._held.high_water)
        await self._held.begin_again(is_head=self._plan.is_at_head)

    def _note_held(self) -> None:
        self._stopover.arrive(self._held.version.number, now=self._monotonic())
        self._plan = self._plan.advanced(self._held.version, self._held.high_water)

    def _remedy(self) -> Remedy:
        announcement = self._plan.announcement
        artifacts = () if announcement is None else announcement.artifacts
        return Remedy(artifacts, self._held.base.words.read)

    def _count_dropped(self, reason: DroppedFetch) -> None:
        self._metrics.dropped_fetches.labels(reason).inc()
        self._starvation.dropped[reason] += 1

    def _log_starvation(self) -> None:
        now, link = self._monotonic(), self._fetcher.link
        if not self._starvation.is_log_due(link, now=now):
            return
        logger.warning(
            "no version taken",
            extra={
                "version": self._plan.held.number,
                "behind_versions": self._plan.behind_versions,
                "for_s": round(self._starvation.for_s(now), 1),
                "round_trip_s": round(link.round_trip_s, 3),
                "mbytes_per_s": round(link.bytes_per_s / 1e6, 3),
                "dropped": {reason.value: times for reason, times in self._starvation.dropped.items()},
                "fix": self._starvation.fix,
            },
        )
