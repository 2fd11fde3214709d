"""Takes leases as far as there is room, and gives back those that will not be answered."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Final

from node.clients.rollout_client import SamplerRolloutClient
from node.errors import RefusedError
from node.failure import FailedLease
from node.limits import LEASES_PER_PEER, LEASES_PER_REQUEST
from node.rollout import LeaseGrant, PromptLease
from node.rpc.channel import Backoff, ConnectionLost
from node.telemetry.metrics import NodeMetrics
from sampler.engines.generation import Generation
from sampler.rollouts.work_queue import Workload

logger = logging.getLogger(__name__)

BOUNDS: Final = frozenset({"concurrency", "staleness", "buffer", "learner", "task", "prompts"})
"""Bounds a hub may name; others are not shown, because what waits are for is a closed label."""

TOO_OLD: Final = "policy version"
"""What a hub names, and what is waited for, where the version held is beyond the staleness bound."""

SHORTEST_WAIT_S: Final = 0.05
LONGEST_WAIT_S: Final = 30.0
"""A hub that says otherwise is not believed."""

FAILURES_IN_A_ROW: Final = 8
"""Leases given back as failed, without a group in between, after which one lease at a time is tried, after a
pause: the task is broken here, and this sampler alone should not find all prompts of the run bad."""


class Leasing:
    """Keeps a workload filled while ``run`` runs."""

    def __init__(
        self,
        client: SamplerRolloutClient,
        *,
        workload: Workload,
        generation: Generation,
        node_metrics: NodeMetrics,
        random: Callable[[], float],
    ) -> None:
        self._client = client
        self._workload = workload
        self._generation = generation
        self._node_metrics = node_metrics
        self._backoff = Backoff(random)
        self._failing = Backoff(random, first_s=1.0)
        self._failures_in_a_row = 0
        self._unwanted: list[str] = []
        self._bound: str | None = None
        """What the last request was refused more for."""
        self._failed: list[FailedLease] = []
        self._changed = asyncio.Event()

    @property
    def is_too_old(self) -> bool:
        """Whether there are no leases because the version held is beyond the staleness bound."""
        return self._bound == TOO_OLD

    def notice_change(self) -> None:
        """Say that there may be room again."""
        self._changed.set()

    def give_back(self, lease_ids: Iterable[str]) -> None:
        """Give leases back before the next request for more."""
        self._unwanted += lease_ids
        self._changed.set()

    def give_up(self, failed: FailedLease) -> None:
        """Give a lease back whose prompt could not be answered, before the next request for more."""
        self._failed.append(failed)
        self.note_failure()

    def note_failure(self) -> None:
        """Count an attempt that came to nothing here, whosever fault it is."""
        self._failures_in_a_row += 1
        self._changed.set()

    def note_success(self) -> None:
        """Note that a prompt was answered: the task works here."""
        self._failures_in_a_row = 0
        self._failing.reset()

    async def run(self, take: Callable[[PromptLease], bool]) -> None:
        """Lease until cancelled.

        Args:
            take: Starts the work on a lease; False if it cannot be done here.
        """
        while True:
            self._changed.clear()
            try:
                await self.give_back_now()
                await self._fill(take)
            except (ConnectionLost, RefusedError) as error:
                logger.warning("no leases", extra={"detail": str(error)})
                with self._node_metrics.waiting("hub"):
                    await self._backoff.wait()

    async def give_back_now(self) -> None:
        """Give back what is unwanted and what has failed.

        Raises:
            RefusedError, ConnectionLost: see ``SamplerRolloutClient``; it is tried again the next time, and
                what the hub never hears of expires by itself.
        """
        unwanted = tuple(self._unwanted[:LEASES_PER_PEER])
        failed = tuple(self._failed[: LEASES_PER_PEER - len(unwanted)])
        if unwanted or failed:
            await self._client.release(unwanted, failed)
            del self._unwanted[: len(unwanted)], self._failed[: len(failed)]

    async def _fill(self, take: Callable[[PromptLease], bool]) -> None:
        with self._node_metrics.waiting(TOO_OLD):
            served = await self._generation.wait_until_serving()
        room = min(self._workload.room(), LEASES_PER_REQUEST)
        if not room:
            await self._changed.wait()
            return
        if self._failures_in_a_row >= FAILURES_IN_A_ROW:
            with self._node_metrics.waiting("task that works"):
                await self._failing.wait()
            room = 1
        # On a far line most of a wait for leases is spent asking again.
        with contextlib.nullcontext() if self._bound is None else self._node_metrics.waiting(self._bound):
            grant = await self._client.lease(room, served)
        self._bound = None
        if not all([take(lease) for lease in grant.leases]):
            # The hub may grant them again at once, for ever.
            with self._node_metrics.waiting("prompt lease"):
                await self._backoff.wait()
            return
        self._backoff.reset()
        if len(grant.leases) < room:
            await self._wait_for_more(grant)

    async def _wait_for_more(self, grant: LeaseGrant) -> None:
        self._bound = f"prompt lease: {grant.waits_for}" if grant.waits_for in BOUNDS else "prompt lease"
        if grant.waits_for == TOO_OLD:
            self._bound = TOO_OLD
        with self._node_metrics.waiting(self._bound):
            await asyncio.sleep(min(max(grant.retry_after_s, SHORTEST_WAIT_S), LONGEST_WAIT_S))
