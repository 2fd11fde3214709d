"""Leases prompts while there is room, and gives back leases that will not be answered."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Final

from node.clients.rollout_client import SamplerRolloutClient
from node.errors import Reason, RefusedError
from node.failure import FailedLease
from node.limits import LEASES_PER_PEER, LEASES_PER_REQUEST
from node.policy import PolicyVersion
from node.rollout import LeaseGrant, PromptLease
from node.rpc.channel import Backoff, ConnectionLost
from node.telemetry.metrics import NodeMetrics
from sampler.engines.engine_thread import EngineThread
from sampler.rollouts.work_queue import WorkQueue
from sampler.stopover import Stopover

logger = logging.getLogger(__name__)

BOUNDS: Final = frozenset(
    {
        "concurrency",
        "staleness",
        "buffer",
        "share",
        "faults",
        "quarantine",
        "learner",
        "ledger",
        "task",
        "prompts",
        "grader",
        "bytes",
    }
)
"""Bounds a hub may name. Others are not shown: what a wait is for is a closed set of labels."""

TOO_OLD: Final = "policy version"
"""The bound a hub names, and the wait, while the version held is beyond the staleness bound."""

SHORTEST_WAIT_S: Final = 0.05
LONGEST_WAIT_S: Final = 30.0
"""Limits on the wait that a hub asks for."""

GRANT_WAIT_S: Final = 2.0
"""How long a stopping sampler waits for the answer to its last request for leases. Leases that it never hears
of expire."""

FAILURES_IN_A_ROW: Final = 8
"""Failed leases without a group in between, after which this sampler takes one lease at a time, with pauses.
The task is then broken here, or the context too short; the coordinator does the same, see ``standing``."""


class Leasing:
    """Keeps a work queue filled while ``run`` runs."""

    def __init__(
        self,
        client: SamplerRolloutClient,
        *,
        work_queue: WorkQueue,
        engine_thread: EngineThread,
        stopover: Stopover,
        node_metrics: NodeMetrics,
        random: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._client = client
        self._work_queue = work_queue
        self._engine_thread = engine_thread
        self._stopover = stopover
        self._monotonic = monotonic
        self._node_metrics = node_metrics
        self._backoff = Backoff(random)
        self._failing = Backoff(random, first_s=1.0)
        self._failures_in_a_row = 0
        self._unwanted: list[str] = []
        self._failed: list[FailedLease] = []
        self._bound: str | None = None
        """What limited the last request."""
        self._changed = asyncio.Event()

    @property
    def is_too_old(self) -> bool:
        """Whether the hub grants no leases because the version held is beyond the staleness bound."""
        return self._bound == TOO_OLD

    def notice_change(self) -> None:
        """Look for room again."""
        self._changed.set()

    def give_back(self, lease_ids: Iterable[str]) -> None:
        """Queue leases to be returned before the next request."""
        self._unwanted += lease_ids
        self._changed.set()

    def give_up(self, failed: FailedLease) -> None:
        """Queue a failed lease to be returned before the next request, with why it failed."""
        self._failed.append(failed)
        self.note_failure()

    def note_failure(self) -> None:
        """Count an attempt that failed here, whatever the cause."""
        self._failures_in_a_row += 1
        self._changed.set()

    def note_success(self) -> None:
        """Note that a prompt was answered: the task works here."""
        self._failures_in_a_row = 0
        self._failing.reset()

    async def run(self, take: Callable[[PromptLease], bool]) -> None:
        """Lease until cancelled.

        Raises:
            RefusedError: BASE_MISMATCH, if the learner joined later than this sampler, with another model.

        Args:
            take: Starts the work on a lease; returns False if it cannot be done here.
        """
        while True:
            self._changed.clear()
            try:
                await self.give_back_now()
                await self._fill(take)
            except (ConnectionLost, RefusedError) as error:
                if isinstance(error, RefusedError) and error.reason is Reason.BASE_MISMATCH:
                    raise
                logger.warning("no leases", extra={"detail": str(error)})
                with self._node_metrics.waiting("hub"):
                    await self._backoff.wait()

    async def give_back_now(self) -> None:
        """Return unwanted and failed leases to the hub.

        Raises:
            RefusedError, ConnectionLost: see ``SamplerRolloutClient``. The next call tries again; a lease
                that the hub never hears of expires.
        """
        unwanted = tuple(self._unwanted[:LEASES_PER_PEER])
        failed = tuple(self._failed[: LEASES_PER_PEER - len(unwanted)])
        if unwanted or failed:
            await self._client.release(unwanted, failed)
            del self._unwanted[: len(unwanted)], self._failed[: len(failed)]

    async def _fill(self, take: Callable[[PromptLease], bool]) -> None:
        with self._node_metrics.waiting(TOO_OLD):
            served = await self._engine_thread.wait_until_serving()
        has_to_ask = self._stopover.has_to_ask(served.number)
        room = min(max(self._work_queue.room(), int(has_to_ask)), LEASES_PER_REQUEST)
        if not room:
            await self._changed.wait()
            return
        if self._failures_in_a_row >= FAILURES_IN_A_ROW:
            with self._node_metrics.waiting("task that works"):
                await self._failing.wait()
            room = 1
        # Over a long round trip, most of a wait for leases is spent asking again.
        with contextlib.nullcontext() if self._bound is None else self._node_metrics.waiting(self._bound):
            grant = await self._granted(room, served)
        self._bound = None
        self._stopover.answered(
            served.number,
            grant.leases,
            from_version=grant.evaluate_from,
            had_to_ask=has_to_ask,
            now=self._monotonic(),
        )
        if not all([take(lease) for lease in grant.leases]):
            # The hub may grant the same leases again at once.
            with self._node_metrics.waiting("prompt lease"):
                await self._backoff.wait()
            return
        self._backoff.reset()
        if len(grant.leases) < room:
            await self._wait_for_more(grant)

    async def _granted(self, room: int, served: PolicyVersion) -> LeaseGrant:
        """Ask for leases. Cancelled meanwhile, give back what is granted all the same."""
        asking = asyncio.create_task(self._client.lease(room, served))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            done, _ = await asyncio.wait({asking}, timeout=GRANT_WAIT_S)
            asking.cancel()
            if done and asking.exception() is None:
                self.give_back(lease.lease_id for lease in asking.result().leases)
            raise

    async def _wait_for_more(self, grant: LeaseGrant) -> None:
        if grant.waits_for == TOO_OLD:
            self._bound = TOO_OLD
        else:
            self._bound = f"prompt lease: {grant.waits_for}" if grant.waits_for in BOUNDS else "prompt lease"
        with self._node_metrics.waiting(self._bound):
            await asyncio.sleep(min(max(grant.retry_after_s, SHORTEST_WAIT_S), LONGEST_WAIT_S))
