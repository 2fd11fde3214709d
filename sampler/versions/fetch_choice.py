"""Decides what a sampler fetches next and which fetch it drops, with metrics and logs of both.

``fetch_plan`` knows the cheapest path in bytes, ``head_pursuit`` what is worth its time on this link,
``starvation`` how long nothing was taken. This module connects them to the clock and the metrics. For the
event loop's thread.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

from node.policy import Announcement, Artifact
from node.weights.transfer.fetcher import Fetcher
from node.weights.transfer.head_pursuit import HeadPursuit, Look, Position
from sampler.metrics import SamplerMetrics
from sampler.versions.fetch_plan import FetchPlan
from sampler.versions.starvation import DroppedFetch, Starvation

logger = logging.getLogger(__name__)

FETCH: Final = "policy fetch"
"""What a sampler waits for while it fetches."""

T = TypeVar("T")


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
        self._pursuit = HeadPursuit(fetcher, monotonic=monotonic)
        self._starvation = Starvation()

    def starving_s(self) -> float:
        """Return for how long newer versions have been available and none was taken."""
        return self._starvation.for_s(self._monotonic())

    def distance(self, behind_versions: int, *, bound_versions: int) -> str:
        """Describe how far this sampler's link keeps it from the staleness bound."""
        return self._pursuit.distance(behind_versions, bound_versions=bound_versions)

    def announced(self, announcement: Announcement, plan: FetchPlan) -> None:
        """Note an announcement, which ``plan`` contains already."""
        self._pursuit.announced(announcement)
        self._starvation.announced(behind_versions=plan.behind_versions, now=self._monotonic())
        self._metrics.versions_behind.set(plan.behind_versions)

    def took(self, plan: FetchPlan) -> None:
        """Note a version that was taken, which ``plan`` holds already."""
        self._pursuit.took()
        self._starvation.took(behind_versions=plan.behind_versions, now=self._monotonic())
        self._metrics.versions_behind.set(plan.behind_versions)

    async def next_artifact(self, plan: Callable[[], FetchPlan], tasks: asyncio.TaskGroup) -> Artifact | None:
        """Return what to fetch now; None: the head is held, or there is no path to it.

        Over a long round trip, wait for what a source chooses to send.

        Args:
            plan: Returns the current plan; it changes during the wait.
            tasks: Owns the request to the source.
        """
        self._metrics.round_trip.set(self._fetcher.link.round_trip_s)
        with self._waiting(FETCH):
            return await self._pursuit.next_artifact(_looking(plan), tasks)

    async def fetch(
        self,
        artifact: Artifact,
        fetching: Coroutine[Any, Any, T],
        *,
        plan: Callable[[], FetchPlan],
        changed: asyncio.Event,
        is_doubted: Callable[[], bool],
    ) -> T | None:
        """Return the result of ``fetching``; None: it was dropped, as ``HeadPursuit.fetch`` decides.

        Args:
            artifact: What it fetches.
            fetching: Ends before this returns.
            plan: Returns the current plan.
            changed: Set whenever the plan or the doubt changes.
            is_doubted: The held version is to be checked first.
        """

        def is_interrupted(_: Position) -> bool:
            self._log_starvation(plan())
            return is_doubted()

        with self._waiting(FETCH):
            fetched = await self._pursuit.fetch(
                artifact, fetching, look=_looking(plan), changed=changed, is_interrupted=is_interrupted
            )
        if fetched is None:
            reason = DroppedFetch.DOUBT if is_doubted() else DroppedFetch.SUPERSEDED
            self.count(reason)
            logger.info("fetch dropped", extra={"artifact": str(artifact.key), "reason": reason.value})
        return fetched

    def count(self, reason: DroppedFetch) -> None:
        """Count a fetch that ended without its version."""
        self._metrics.dropped_fetches.labels(reason).inc()
        self._starvation.dropped[reason] += 1

    def _log_starvation(self, plan: FetchPlan) -> None:
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


def _looking(plan: Callable[[], FetchPlan]) -> Look:
    async def look() -> FetchPlan:
        return plan()

    return look
