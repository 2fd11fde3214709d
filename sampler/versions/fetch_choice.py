"""What a sampler fetches next, what it drops, and what people are told of both.

The decisions are in ``pursuit`` and ``starvation``; here are the fetcher they are about, the clock, and
the metrics. For the event loop's thread.
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
from sampler.versions.starvation import DroppedFetch, Starvation
from sampler.versions.sync_state import SyncState

logger = logging.getLogger(__name__)

FETCH: Final = "policy fetch"
"""What a fetch under way is a wait for."""


class FetchChoice:
    """Follows one fetch after the other."""

    def __init__(
        self,
        fetcher: Fetcher,
        *,
        metrics: SamplerMetrics,
        waiting: Callable[[str], AbstractContextManager[None]],
        monotonic: Callable[[], float],
    ) -> None:
        """Follow ``fetcher``; ``waiting`` is ``NodeMetrics.waiting``."""
        self._fetcher = fetcher
        self._metrics = metrics
        self._waiting = waiting
        self._monotonic = monotonic
        self._pursuit = Pursuit()
        self._starvation = Starvation()

    def starving_s(self) -> float:
        """Return for how long newer versions have been there and none was taken."""
        return self._starvation.for_s(self._monotonic())

    def distance(self, behind_versions: int, *, bound_versions: int) -> str:
        """Return, for people, how far the link keeps this sampler from the staleness bound."""
        pursuit = self._pursuit.measured(self._fetcher.link)
        return pursuit.distance(behind_versions, bound_versions=bound_versions)

    def waits(self) -> AbstractContextManager[None]:
        """Count the body as a wait for a fetch."""
        return self._waiting(FETCH)

    def announced(self, announcement: Announcement, state: SyncState) -> None:
        """Note an announcement, which is in ``state`` already."""
        self._pursuit = self._pursuit.announced(announcement)
        self._starvation.announced(behind_versions=state.behind_versions, now=self._monotonic())
        self._metrics.versions_behind.set(state.behind_versions)

    def took(self, state: SyncState) -> None:
        """Note a version that was taken, which ``state`` holds already."""
        self._pursuit = self._pursuit.took()
        self._starvation.took(behind_versions=state.behind_versions, now=self._monotonic())
        self._metrics.versions_behind.set(state.behind_versions)

    async def next_artifact(
        self, state: Callable[[], SyncState], tasks: asyncio.TaskGroup
    ) -> Artifact | None:
        """Return what to fetch now; None: the head is held, or there is no way to it.

        On a far link it waits for what a source chooses to send.

        Args:
            state: as it is when asked; it changes while this waits.
            tasks: owns the request to the source.
        """
        path = state().path()
        self._pursuit = self._pursuit.measured(self._fetcher.link)
        self._metrics.round_trip.set(self._pursuit.link.round_trip_s)
        if not path or self._pursuit.keeps_up(path, behind_versions=state().behind_versions):
            return next(iter(path), None)
        with self.waits():
            coming = await self._fetcher.pushed_artifact(
                state().held.number, tasks, patience_s=self._pursuit.patience_s
            )
        if coming is not None and state().can_start(coming.key):
            return coming
        return state().next_artifact()

    def reason_to_drop(self, artifact: Artifact, state: SyncState) -> DroppedFetch | None:
        """Return why the fetch under way ends here; None: it goes on."""
        if not state.is_useless(artifact.key):
            return None
        is_worth_finishing = self._pursuit.measured(self._fetcher.link).is_worth_finishing(
            self._fetcher.progress, artifact, instead=state.next_artifact(), now=self._monotonic()
        )
        return None if is_worth_finishing else DroppedFetch.SUPERSEDED

    def drop(self, artifact: Artifact, reason: DroppedFetch) -> None:
        """Note a fetch that ends although nothing failed."""
        self._fetcher.give_up()
        self._pursuit = self._pursuit.dropped()
        self.count(reason)
        logger.info("fetch dropped", extra={"artifact": str(artifact.key), "reason": reason.value})

    def count(self, reason: DroppedFetch) -> None:
        """Count a fetch that ended without its version."""
        self._metrics.dropped_fetches.labels(reason).inc()
        self._starvation.dropped[reason] += 1

    def tell_starvation(self, state: SyncState) -> None:
        """Say, once in a while, that nothing was taken for long."""
        now, link = self._monotonic(), self._fetcher.link
        if not self._starvation.is_to_be_told(link, now=now):
            return
        logger.warning(
            "no version taken",
            extra={
                "version": state.held.number,
                "behind_versions": state.behind_versions,
                "for_s": round(self._starvation.for_s(now), 1),
                "round_trip_s": round(link.round_trip_s, 3),
                "mbytes_per_s": round(link.bytes_per_s / 1e6, 3),
                "dropped": {reason.value: times for reason, times in self._starvation.dropped.items()},
                "fix": "put a relay near this sampler, widen its link, or make steps longer",
            },
        )
