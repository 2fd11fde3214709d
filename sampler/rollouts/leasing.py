"""Leases prompts while there is room, and gives back leases that will not be answered.

How much room there is the work queue says; ``fill_engine`` sizes it by how full the engine is.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from node.clients.rollouts.rollout_client import SamplerRolloutClient
from node.errors import Reason, RefusedError
from node.rpc.call_ends import ConnectionLost
from node.system.backoff import Backoff
from node.system.waits import drop, wait_at_most
from node.telemetry.metrics import NodeMetrics
from node.values.groups.failure import FailedLease, Failure
from node.values.groups.rollout import LeaseGrant, PromptLease
from node.values.limits import LEASES_PER_PEER, LEASES_PER_REQUEST
from node.values.policy import PolicyVersion
from sampler.engines.engine import EngineUse
from sampler.rollouts.concurrency import Concurrency
from sampler.rollouts.work_queue import JobState, WorkQueue
from sampler.served_policy import ServedPolicy

logger = logging.getLogger(__name__)

ORDERS: Final = ("paused", "drained")
"""Bounds that are an operator's word."""

BOUNDS: Final = frozenset({
    "checks",
    "concurrency", "staleness", "buffer", "share", "faults", "quarantine", "learner", "ledger",
    "prompts", "grader", "base model", "bytes", "grading", *ORDERS,
})  # fmt: skip
"""Bounds a hub may name. Others are not shown: what a wait is for is a closed set of labels."""

UNDECIDED: Final = frozenset({"learner", "ledger", "paused"})
"""Bounds of a coordinator that does not say what is left to evaluate: it has started again, or is paused."""

TOO_OLD: Final = "policy version"
"""The bound a hub names, and the wait, while the version held is beyond the staleness bound."""

BACKLOGS: Final[Mapping[JobState | None, str]] = {
    JobState.GRADING: "graders",
    JobState.SUBMITTING: "submission",
}
"""Where finished groups wait while the engine is without work -> name of the wait."""

TOO_FEW_GROUPS: Final = "groups at once"
"""The wait of an engine that has room for more groups than an operator has set."""

LOOK_AGAIN_S: Final = 1.0
"""Longest wait for room or a version without looking again."""

SHORTEST_WAIT_S: Final = 0.05
LONGEST_WAIT_S: Final = 30.0
"""Limits on the wait that a hub asks for."""

READING_S: Final = 0.1
"""How often the engine is asked how full it is."""

GRANT_WAIT_S: Final = 2.0
"""How long a stopping sampler waits for the answer to its last request for leases. Leases that it never hears
of expire."""

FAILURES_IN_A_ROW: Final = 8
"""Failed leases without a group in between, after which this sampler takes one lease at a time, with pauses.
The task is then broken here, or the context too short; the coordinator does the same, see ``standing``."""


class Leasing:
    """Keeps a work queue filled while ``run`` runs.

    Attributes:
        bound_versions: The run's staleness bound; None before it is known.
    """

    def __init__(
        self,
        client: SamplerRolloutClient,
        policy: ServedPolicy,
        *,
        work_queue: WorkQueue,
        node_metrics: NodeMetrics,
        random: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._client = client
        self._policy = policy
        self.work_queue = work_queue
        self.bound_versions: int | None = None
        self._monotonic = monotonic
        self._node_metrics = node_metrics
        self._backoff = Backoff(random)
        self._failing = Backoff(random, first_s=1.0)
        self._failures_in_a_row = 0
        self._unwanted: list[str] = []
        self._failed: list[FailedLease] = []
        self._bound: str | None = None
        """Name of what holds this sampler back: the limit on its last request, or a backlog."""
        self._is_held_back = True
        """Whether it got fewer leases than it has room for, when it last asked."""
        self._has_too_few_groups = False
        self._order = ""
        """The operator's order that holds this sampler back; empty: none."""
        self._changed = asyncio.Event()
        policy.listen(lambda _: self.notice_change())

    @property
    def is_too_old(self) -> bool:
        """Whether the hub grants no leases because the version held is beyond the staleness bound."""
        return self._bound == TOO_OLD

    @property
    def held_back_by(self) -> str:
        """Name of the wait of a sampler that could generate more than it does; empty: nothing holds it
        back."""
        return self._bound or (TOO_FEW_GROUPS if self._has_too_few_groups else "")

    def notice_change(self) -> None:
        """Look for room again."""
        self._changed.set()

    def give_back(self, lease_ids: Iterable[str]) -> None:
        """Queue leases to be returned before the next request."""
        self._unwanted += lease_ids
        self._changed.set()

    def give_up(self, lease_id: str, fault: Failure | None, detail: str = "") -> None:
        """Queue a lease that failed to be returned, with its prompt's fault; None: the prompt has none."""
        self._failures_in_a_row += 1
        if fault is None:
            self.give_back([lease_id])
        else:
            self._failed.append(FailedLease(lease_id, fault, detail))
            self._changed.set()

    def note_success(self) -> None:
        """Note that a prompt was answered: the task works here."""
        self._failures_in_a_row = 0
        self._failing.reset()
        self._changed.set()

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
                self._is_held_back = True
                if isinstance(error, RefusedError) and error.reason is Reason.BASE_MISMATCH:
                    raise
                logger.warning("no leases", extra={"detail": str(error)})
                with self._node_metrics.waiting("hub"):
                    await self._backoff.wait()

    async def fill_engine(
        self, use: Callable[[], EngineUse], *, are_graders_late: Callable[[], bool], is_set: bool
    ) -> None:
        """Size the work queue so that its groups fill the engine, by its ``use``, until cancelled.

        Args:
            is_set: whether its size is an operator's word; then only note that it is too small.
        """
        concurrency = Concurrency(now=self._monotonic())
        if is_set:
            concurrency.groups = self.work_queue.concurrency_groups
        while True:
            await asyncio.sleep(READING_S)
            if self._policy.served is None:  # the engine draws nothing
                concurrency.begin(now=self._monotonic())
                continue
            is_decided = concurrency.note(
                use(),
                is_held_back=self._is_held_back
                or self.work_queue.backlog() is not None
                or are_graders_late(),
                group_s=self.work_queue.group_s,
                now=self._monotonic(),
            )
            if is_set and is_decided:
                self._has_too_few_groups = concurrency.groups > self.work_queue.concurrency_groups
                concurrency.groups = self.work_queue.concurrency_groups
            elif concurrency.groups != self.work_queue.concurrency_groups:
                logger.debug("groups at once", extra={"groups": concurrency.groups})
                self.work_queue.concurrency_groups = concurrency.groups
                self._changed.set()

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
        served, has_to_ask = self._policy.served, self._policy.has_to_ask
        stays = self._policy.stays(now=self._monotonic())
        if served is None:
            with self._node_metrics.waiting(TOO_OLD):
                await self._pause(LOOK_AGAIN_S, until=lambda: self._policy.served is not None)
            return
        room = min(max(self.work_queue.room(), int(has_to_ask)), LEASES_PER_REQUEST)
        if not room:
            self._bound = BACKLOGS.get(self.work_queue.backlog())
            with self._shown():
                await wait_at_most(self._changed, LOOK_AGAIN_S)
            self._bound = None
            return
        if is_failing := self._failures_in_a_row >= FAILURES_IN_A_ROW:
            with self._node_metrics.waiting("task that works"):
                await self._pause(self._failing.next_s(), until=lambda: not self._failures_in_a_row)
            room = 1
        # Over a long round trip, most of a wait for leases is spent asking again.
        with self._shown():
            grant = await self._granted(room, served, stays=stays)
        self._bound = None
        self._note_order(grant.waits_for if grant.waits_for in ORDERS else "")
        if grant.waits_for not in UNDECIDED:
            self._policy.answered(served.number, grant, had_to_ask=has_to_ask, now=self._monotonic())
        is_work = all([take(lease) for lease in grant.leases])
        self._is_held_back = is_failing or not is_work or len(grant.leases) < room
        if is_work:
            self._backoff.reset()
            if len(grant.leases) == room:
                return
            if grant.waits_for == TOO_OLD:
                self._bound = TOO_OLD
            else:
                self._bound = "prompt lease" + (f": {grant.waits_for}" if grant.waits_for in BOUNDS else "")
            wait_s = min(max(grant.retry_after_s, SHORTEST_WAIT_S), LONGEST_WAIT_S)
        else:  # the hub may grant the same leases again at once
            wait_s = self._backoff.next_s()
        with self._node_metrics.waiting(self._bound or "prompt lease"):
            # The answer was about the version held, and about a stop of which nothing was left to ask for.
            await self._pause(
                wait_s,
                until=lambda: self._policy.served != served or (self._policy.has_to_ask and not has_to_ask),
            )

    def _shown(self) -> contextlib.AbstractContextManager[None]:
        """Count a body as a wait for what holds this sampler back."""
        return contextlib.nullcontext() if self._bound is None else self._node_metrics.waiting(self._bound)

    def _note_order(self, order: str) -> None:
        if order != self._order:
            self._order = order
            logger.info("held back by an operator" if order else "leases again", extra={"order": order})

    async def _pause(self, limit_s: float, *, until: Callable[[], bool]) -> None:
        """Wait until a change makes ``until`` true; give back leases meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not until():
                    self._changed.clear()
                    await self.give_back_now()
                    await self._changed.wait()

    async def _granted(self, room: int, served: PolicyVersion, *, stays: bool) -> LeaseGrant:
        """Ask for leases. Cancelled meanwhile, give back what is granted all the same."""
        asking = asyncio.create_task(self._client.lease(room, served, stays=stays))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            done, _ = await asyncio.wait({asking}, timeout=GRANT_WAIT_S)
            drop(asking)
            if done and asking.exception() is None:
                self.give_back(lease.lease_id for lease in asking.result().leases)
            raise
