"""Decides what a sampler fetches next and which fetch it drops, with metrics and logs of both.

``fetch_plan`` knows the cheapest path in bytes, ``pursuit`` what is worth its time on this link,
``starvation`` how long nothing was taken. This module connects them to the fetcher, the clock and the
metrics. For the event loop's thread.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from node.policy import Announcement, Artifact
from node.weights.planning.pursuit import Pursuit
from node.weights.transfer.fetcher import Fetcher
from sampler.metrics import SamplerMetrics
from sampler.versions.fetch_plan import FetchPlan
from sampler.versions.starvation import DroppedFetch, Starvation

logger = logging.getLogger(__name__)

FETCH: Final = "policy fetch"
"""What a sampler waits for while it fetches."""


class FetchChoice:
    """Chooses one fetch after the other."""

    def __init__(
        self,
        fetcher: Fetcher,
        *,
        metrics: SamplerMetrics,
        waiting: Callable[[str], AbstractContextManager[None]],
        monotonic: Callable[[], float],
    ) -> None:
        """Choose for ``fetcher``; ``waiting`` is ``NodeMetrics.waiting``."""
        self._fetcher = fetcher
        self._metrics = metrics
        self._waiting = waiting
        self._monotonic = monotonic
        self._pursuit = Pursuit()
        self._starvation = Starvation()

    def starving_s(self) -> float:
        """Return for how long newer versions have been available and none was taken."""
        return self._starvation.for_s(self._monotonic())

    def distance(self, behind_versions: int, *, bound_versions: int) -> str:
        """Describe how far this sampler's link keeps it from the staleness bound."""
        pursuit = self._pursuit.measured(self._fetcher.link)
        return pursuit.distance(behind_versions, bound_versions=bound_versions)

    def waits(self) -> AbstractContextManager[None]:
        """Count the body as a wait for a fetch."""
        return self._waiting(FETCH)

    def announced(self, announcement: Announcement, plan: FetchPlan) -> None:
        """Note an announcement, which ``plan`` contains already."""
        self._pursuit = self._pursuit.announced(announcement)
        self._starvation.announced(behind_versions=plan.behind_versions, now=self._monotonic())
        self._metrics.versions_behind.set(plan.behind_versions)

    def took(self, plan: FetchPlan) -> None:
        """Note a version that was taken, which ``plan`` holds already."""
        self._pursuit = self._pursuit.took()
        self._starvation.took(behind_versions=plan.behind_versions, now=self._monotonic())
        self._metrics.versions_behind.set(plan.behind_versions)

    async def next_artifact(self, plan: Callable[[], FetchPlan], tasks: asyncio.TaskGroup) -> Artifact | None:
        """Return what to fetch now; None: the head is held, or there is no path to it.

        Over a long round trip, wait for what a source chooses to send.

        Args:
            plan: Returns the current plan; it changes during the wait.
            tasks: Owns the request to the source.
        """
        path = plan().path()
        self._pursuit = self._pursuit.measured(self._fetcher.link)
        self._metrics.round_trip.set(self._pursuit.link.round_trip_s)
        if not path or self._pursuit.keeps_up(path, behind_versions=plan().behind_versions):
            return next(iter(path), None)
        with self.waits():
            pushed = await self._fetcher.pushed_artifact(
                plan().held.number, tasks, patience_s=self._pursuit.patience_s
            )
        if pushed is not None and plan().can_start(pushed.key):
            return pushed
        return plan().next_artifact()

    def reason_to_drop(self, artifact: Artifact, plan: FetchPlan) -> DroppedFetch | None:
        """Return why to drop the fetch under way; None: continue it."""
        if not plan.is_useless(artifact.key):
            return None
        is_worth_finishing = self._pursuit.measured(self._fetcher.link).is_worth_finishing(
            self._fetcher.progress, artifact, instead=plan.next_artifact(), now=self._monotonic()
        )
        return None if is_worth_finishing else DroppedFetch.SUPERSEDED

    def drop(self, artifact: Artifact, reason: DroppedFetch) -> None:
        """Note a fetch that is dropped although nothing failed."""
        self._fetcher.give_up()
        self._pursuit = self._pursuit.dropped()
        self.count(reason)
        logger.info("fetch dropped", extra={"artifact": str(artifact.key), "reason": reason.value})

    def count(self, reason: DroppedFetch) -> None:
        """Count a fetch that ended without its version."""
        self._metrics.dropped_fetches.labels(reason).inc()
        self._starvation.dropped[reason] += 1

    def log_starvation(self, plan: FetchPlan) -> None:
        """Log, once in a while, that nothing was taken for long."""
        now, link = self._monotonic(), self._fetcher.link
        if not self._starvation.is_log_due(link, now=now):
            return
        logger.warning(
            "no version taken",
            extra={
                "version": plan.held.number,
                "behind_versions": plan.behind_versions,
                "for_s": round(self._starvation.for_s(now), 1),
                "round_trip_s": round(link.round_trip_s, 3),
                "mbytes_per_s": round(link.bytes_per_s / 1e6, 3),
                "dropped": {reason.value: times for reason, times in self._starvation.dropped.items()},
                "fix": "put a relay near this sampler, give it a faster link, or make steps longer",
            },
        )
