"""Follows the head: keeps the engine on the newest policy version, while it generates.

    announcement --> choose --> fetch, assemble, verify --> remember --> apply between decode steps
         ^             |          |                                         |
         |             |          `-- not worth finishing: drop             |
         `-------------+----------------------------------------------------'

``fetch_choice`` decides what to fetch next and what to drop, ``held_version`` changes the live words,
``damage_repair`` repairs them. Every version on the way to the head is verified and applied: over a slow
link, a version nearer to the head is worth having.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Final

from node.errors import CountRefusal, RefusedError
from node.policy import Announcement, Artifact, PolicyVersion
from node.rpc.channel import Backoff, ConnectionLost
from node.telemetry.transfer_metrics import TransferMetrics
from node.waits import run_until
from node.weights.format.layout import Layout
from node.weights.planning.chain import PUBLIC_VERSION
from node.weights.store.high_water import HighWater
from node.weights.transfer.advance import Remedy, fetch_into
from node.weights.transfer.fetcher import Fetcher
from sampler.metrics import SamplerMetrics
from sampler.versions.damage_repair import DamageRepair
from sampler.versions.fetch_choice import FetchChoice
from sampler.versions.fetch_plan import FetchPlan
from sampler.versions.held_version import HeldVersion
from sampler.versions.starvation import DroppedFetch
from sampler.versions.version_assembly import VersionAssembly

logger = logging.getLogger(__name__)

LOOK_AGAIN_S: Final = 0.25
"""Longest time until a fetch that is not worth finishing is noticed."""


class PolicySync:
    """A service, ready once it has something to serve."""

    name = "policy sync"

    def __init__(
        self,
        fetcher: Fetcher,
        *,
        watch: Callable[[], AsyncIterator[Announcement]],
        held: HeldVersion,
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
            found_damage: Called when the live words are not what was verified; it calls ``doubt``.
            waiting: ``NodeMetrics.waiting``.
            random: Draws in [0, 1), for the backoff.
        """
        self._fetcher = fetcher
        self._watch = watch
        self._held = held
        self._layout = layout
        self._transfer_metrics = transfer_metrics
        self._choice = FetchChoice(fetcher, metrics=metrics, waiting=waiting, monotonic=monotonic)
        self._repair = DamageRepair(
            held, fetcher, layout=layout, transfer_metrics=transfer_metrics, found_damage=found_damage
        )
        self._count_refusal = count_refusal
        self._backoff = Backoff(random)
        self._changed = asyncio.Event()
        self._is_doubted = False
        self._plan = FetchPlan(PolicyVersion(PUBLIC_VERSION), HighWater())

    def starving_s(self) -> float:
        """Return for how long newer versions have been available and none was taken."""
        return self._choice.starving_s()

    def distance(self, *, bound_versions: int) -> str:
        """Describe how far this sampler is from the staleness bound."""
        return self._choice.distance(self._plan.behind_versions, bound_versions=bound_versions)

    def doubt(self) -> None:
        """Compare what is held with what was signed, and repair it."""
        self._is_doubted = True
        self._changed.set()

    def scrub(self) -> None:
        """Hash some of the live words again, soon."""
        self._repair.scrub()

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Follow the head until ``stopping``.

        Raises:
            StartupError: what is on disk cannot be used.
            RefusedError: no source will ever announce anything to this peer.
        """
        await self._held.load()
        self._plan = self._plan.advanced(self._held.version, self._held.high_water)
        ready()
        await run_until(stopping, self._follow())

    async def _follow(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            await self._held.serve()
            tasks.create_task(self._repair.scrub_when_due())
            while True:
                self._changed.clear()
                if self._is_doubted:
                    await self._resolve_doubt()
                artifact = await self._choice.next_artifact(lambda: self._plan, tasks)
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
                self._choice.announced(announcement, self._plan)
            except RefusedError as refused:
                self._count_refusal(service="PolicyService", reason=refused.reason)
                logger.warning("announcement refused", extra={"detail": str(refused)})
            self._changed.set()

    async def _advance(self, artifact: Artifact) -> None:
        try:
            with self._choice.waits():
                assembly = await self._fetch_unless_useless(artifact)
            if assembly is not None:
                await self._take(assembly)
                self._backoff.reset()
        except ConnectionLost as lost:
            self._choice.count(DroppedFetch.LOST)
            logger.info("fetch interrupted", extra={"artifact": str(artifact.key), "detail": str(lost)})
            await self._backoff.wait(self._changed)
        except RefusedError as refused:
            self._choice.count(DroppedFetch.REFUSED)
            self._count_refusal(service="PolicyService", reason=refused.reason)
            fields = {"artifact": str(artifact.key), "detail": str(refused)}
            logger.warning("artifact not usable", extra=fields)
            self._plan = self._plan.failed(artifact.key)

    async def _fetch_unless_useless(self, artifact: Artifact) -> VersionAssembly | None:
        fetching = asyncio.create_task(self._fetch(artifact))
        try:
            while not fetching.done():
                changed = asyncio.create_task(self._changed.wait())
                # A fetch may also become useless by the time it takes.
                await asyncio.wait(
                    {fetching, changed}, timeout=LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED
                )
                changed.cancel()
                self._changed.clear()
                if fetching.done():
                    break
                reason = self._choice.reason_to_drop(artifact, self._plan)
                if self._is_doubted:
                    reason = DroppedFetch.DOUBT
                if reason is not None:
                    self._choice.drop(artifact, reason)
                    return None
                self._choice.log_starvation(self._plan)
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
        return fetching.result()

    async def _fetch(self, artifact: Artifact) -> VersionAssembly:
        manifest, signed = await self._fetcher.signed_manifest(artifact.key)
        assembly = await self._held.begin(manifest, signed)
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
            await self._held.restore()
            self._note_held()
            return
        self._note_held()
        self._choice.took(self._plan)
        await self._held.save()

    async def _resolve_doubt(self) -> None:
        self._is_doubted = False
        if await self._repair.repair(self._remedy()):
            self._note_held()
            return
        logger.warning("held policy in doubt, beginning again", extra={"version": self._held.version.number})
        self._plan = self._plan.advanced(self._held.base.version, self._held.high_water)
        await self._held.begin_again(is_head=self._plan.is_at_head)

    def _note_held(self) -> None:
        self._plan = self._plan.advanced(self._held.version, self._held.high_water)

    def _remedy(self) -> Remedy:
        announcement = self._plan.announcement
        artifacts = () if announcement is None else announcement.artifacts
        return Remedy(artifacts, self._held.base.words.read)
