"""The durable rollout spool: leases out, groups in, groups on to the learner.

What a caller is answered is on disk: see ``transactions``. What a decision may be is in ``work``; this is its
shell, with the metrics and the log, and the one stream that a learner drains.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final, TypeAlias

from node.clock import Clock, moment
from node.coordinator.data.rows import Rows
from node.coordinator.drain_stream import DrainStream
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.transactions import Decide, Transactions
from node.coordinator.work import decisions, order_decisions, step_history, trust, verdicts
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.balance import Transaction
from node.coordinator.work.decisions import Decision
from node.coordinator.work.model_check import Learner
from node.coordinator.work.orders import FOR_LEARNER
from node.coordinator.work.sampler_standing import Standing
from node.coordinator.work.slots import is_held_out
from node.coordinator.work.step_history import Hello, Outcome
from node.coordinator.work.verdicts import Judged, Submitted
from node.coordinator.work.version_log import Announced
from node.errors import Reason, RefusedError
from node.failure import FailedLease
from node.limits import LEASED_ROWS_BYTES
from node.operator_order import PARDON, Order, OrderAnswer
from node.policy import PolicyVersion
from node.rollout import (
    EncodedGroup,
    GroupHeader,
    GroupTerms,
    LeaseGrant,
    PromptLease,
    RolloutGroup,
    other_options,
)
from node.run import StepRecord
from node.telemetry.lag import submission_lags
from node.verdict import GroupVerdict, Verdict

logger = logging.getLogger(__name__)

HELD_BACK_RETRY_S: Final = 1.0
"""How soon a sampler asks again that an operator holds back: how late it may notice that this has ended."""

Notify: TypeAlias = Callable[[str, GroupVerdict], None]
"""Reports to a sampler what became of its group."""


OrdersTold: TypeAlias = tuple[Order, ...]
"""All orders to the learner that hold or have no answer."""


@dataclass(frozen=True, slots=True)
class Quarantines:
    samplers: tuple[Standing, ...]
    releases_others: bool
    """Whether an operator has pardoned others."""


class Spool:
    """One run's; used on the event loop's thread."""

    def __init__(
        self,
        transactions: Transactions,
        *,
        rows: Rows | None = None,
        is_published: Callable[[int], bool],
        notify: Notify,
        metrics: CoordinatorMetrics,
        clock: Clock,
    ) -> None:
        """Serve a run from its ledger and ``rows``, if it has data."""
        self._transactions = transactions
        self._settle = transactions.settle
        self._accounts = transactions.accounts
        self.rows = rows
        self._is_published = is_published
        self._notify = notify
        self._metrics = metrics
        self.clock = self._clock = clock
        self._drain: DrainStream | None = None
        self._has_answers = asyncio.Condition()
        """Notified when the learner has answered an order."""
        self._has_pardons = False
        """Whether an operator has pardoned samplers since a learner was here to hear of it."""
        self.has_spooled: Callable[[], None] = lambda: None
        """Called when a group was spooled: a verifier may be waiting for it."""
        transactions.went_back = self._end_drain
        for verdict, n in self._accounts.tallies.total().items():
            metrics.groups.labels(verdict).inc(n)

    @property
    def accounts(self) -> Accounts:
        """The accounts that the ledger adds up to; read only."""
        return self._accounts

    async def close(self) -> None:
        await self._transactions.close()
        if self.rows is not None:
            self.rows.close()

    async def lease(
        self, sampler_id: str, wanted: int, held: PolicyVersion | None, *, stays: bool = False
    ) -> LeaseGrant:
        """Lease prompts to a sampler that will sample them with ``held`` or newer.

        Where it goes away before it hears of them, they are leased to the next.

        Raises:
            RefusedError: DISK; a row cannot be read. Nothing was leased.
        """
        if held_back := self._accounts.orders.held_back(sampler_id):
            return LeaseGrant((), HELD_BACK_RETRY_S, held_back)
        if self.rows is not None:
            wanted = min(wanted, max(1, LEASED_ROWS_BYTES // self.rows.longest_bytes))
        if stays and held is not None and self._accounts.evaluations.is_due(held.number):
            await self._settle(
                lambda now: decisions.evaluation_begins(self._accounts, held, now=now), caller=sampler_id
            )

        def take_back(grant: LeaseGrant) -> Decide | None:
            lease_ids = tuple(lease.lease_id for lease in grant.leases)
            if not lease_ids:
                return None
            return lambda now: decisions.release(
                self._accounts, sampler_id=sampler_id, lease_ids=lease_ids, failed=(), now=now
            )

        grant = await self._settle(
            lambda now: decisions.lease(
                self._accounts, sampler_id=sampler_id, wanted=wanted, held=held, stays=stays, now=now
            ),
            caller=sampler_id,
            undo=take_back,
        )
        if self.rows is None or not grant.leases:
            return grant
        try:
            leases = await asyncio.to_thread(_with_rows, grant.leases, self.rows)
        except (RefusedError, asyncio.CancelledError) as error:
            if isinstance(error, RefusedError):
                logger.error("row not read", extra={"detail": str(error)})
            self._transactions.settle_unheard(take_back(grant))
            raise
        return replace(grant, leases=leases)

    async def release(
        self, sampler_id: str, lease_ids: tuple[str, ...], failed: tuple[FailedLease, ...] = ()
    ) -> int:
        """Release leases, unbegun or ``failed``; return how many of them the sampler held."""
        released = await self._settle(
            lambda now: decisions.release(
                self._accounts, sampler_id=sampler_id, lease_ids=lease_ids, failed=failed, now=now
            ),
            caller=sampler_id,
        )
        for fault in released.faults:
            self._metrics.prompt_faults.labels(fault).inc()
        return released.leases

    def renew(self, sampler_id: str, lease_ids: tuple[str, ...]) -> tuple[str, ...]:
        """Extend leases to a full term; return those whose work is in vain."""
        return self._accounts.renew(sampler_id, lease_ids, now=self._clock.now())

    async def end_leases(self, sampler_id: str) -> None:
        """End a sampler's leases, because the process that took them is gone."""
        self._accounts.slots.cut_short(sampler_id, now=self._clock.now())
        await self.expire()

    async def expire(self) -> None:
        """End the leases whose time is up; a clock that was set back keeps none beyond a full term."""
        if set_back_s := self._accounts.note_time(self._clock.now()):
            logger.warning(
                "this machine's clock was set back",
                extra={"seconds": round(set_back_s, 3), "note": "leases end within a full term"},
            )
        expired = await self._settle(lambda now: decisions.expiry(self._accounts, now))
        if expired:
            self._metrics.lease_expiries.inc(expired)
            logger.info("leases expired", extra={"leases": expired})

    async def give(self, asked: Sequence[Order], *, again: bool = False) -> tuple[Order, ...]:
        """Take operators' orders; return them as they stand. Raises RefusedError: see ``decided``."""
        orders = await self._settle(
            lambda now: order_decisions.given(self._accounts, asked, again=again, now=now)
        )
        self._heed(order_decisions.new_ones(orders, asked))
        return orders

    async def carry_out_overdue(self) -> None:
        """Carry out the orders that were given while no coordinator ran."""
        while self._accounts.orders.overdue():
            late = await self._settle(lambda now: order_decisions.overdue(self._accounts, now=now))
            self._heed(late)

    def _heed(self, orders: Sequence[Order]) -> None:
        for order in orders:
            fields = {name: value for name, value in asdict(order).items() if value and name != "order_id"}
            logger.warning("order of an operator", extra=fields)
        self._has_pardons |= any(order.verb == PARDON for order in orders)
        if self._drain is not None:
            self._drain.has_pardons, self._has_pardons = self._drain.has_pardons or self._has_pardons, False
            self._drain.has_orders |= any(order.verb in FOR_LEARNER for order in orders)
            self._drain.wake()

    async def note_answer(self, drain: DrainStream, told: OrderAnswer) -> None:
        """Note the learner's answer to an order, unless either was replaced meanwhile."""

        def decide(_: float) -> Decision[Order | None]:
            order = None if drain.is_ended else self._accounts.orders.answered(told)
            return Decision(order, Transaction(facts=() if order is None else (order,)))

        if await self._settle(decide) is not None:
            level = logging.ERROR if told.is_refused else logging.INFO
            logger.log(level, "order answered by the learner", extra=asdict(told))
        async with self._has_answers:
            self._has_answers.notify_all()

    async def answers_to(self, orders: Sequence[Order], *, wait_s: float) -> tuple[Order, ...]:
        """Return orders to the learner once it has answered all of them, or ``wait_s`` are over; at once
        where it is not here."""

        def now_stand() -> tuple[Order, ...]:
            known = self._accounts.orders
            return tuple(known.newest(order.verb, order.about) or order for order in orders)

        is_here = self._drain is not None and not self._drain.is_ended
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s * is_here), self._has_answers:
                await self._has_answers.wait_for(lambda: all(order.answer for order in now_stand()))
        return now_stand()

    async def quarantine(self, sampler_id: str, reason: str) -> None:
        await self._settle(lambda now: trust.quarantine(self._accounts, sampler_id, reason, now=now))
        logger.warning(
            "sampler quarantined" if reason else "sampler released from quarantine",
            extra={"sampler": sampler_id, "reason": reason},
        )

    async def submit(
        self, encoded: EncodedGroup, group: GroupHeader | RolloutGroup | RefusedError
    ) -> Submitted:
        """Accept a group, or return why not; what is SPOOLED is on disk.

        Args:
            group: What was read of it, see ``verdicts.submission``.
        Raises:
            RefusedError: BUSY where the spool is full, DISK where it cannot be written.
        """
        sampler_id = encoded.sampler_id
        if not isinstance(group, RefusedError):
            self._count_misgraded(group)

        def decide(now: float) -> Decision[Submitted]:
            return verdicts.submission(
                self._accounts, encoded, group, is_published=self._is_published, now=now
            )

        submitted = await self._settle(decide, caller=sampler_id)
        is_for_training = not is_held_out(encoded.group_id)
        groups = self._metrics.groups if is_for_training else self._metrics.evaluation_groups
        groups.labels(submitted.verdict).inc()
        if submitted.verdict is Verdict.SPOOLED and isinstance(group, GroupTerms):
            if is_for_training:
                self._observe_lags(sampler_id, group)
                self.wake_drain()
            self.has_spooled()
        elif submitted.verdict not in (Verdict.SPOOLED, Verdict.DUPLICATE):
            logger.warning(
                "group refused",
                extra={"sampler": sampler_id, "verdict": submitted.verdict, "detail": submitted.detail},
            )
        return submitted

    def _count_misgraded(self, group: GroupTerms) -> None:
        if other_options(group, self._accounts.work.task_digest):
            self._metrics.misgraded_groups.labels("task options").inc()
        elif self._accounts.work.objection_to_grader(group.grader_digest):
            self._metrics.misgraded_groups.labels("grader code").inc()

    async def evaluate(self, head: PolicyVersion | None) -> None:
        """Count answers, end an evaluation that is over, plan the next; ``head``: the newest version."""
        await self._settle(lambda now: decisions.evaluation_turn(self._accounts, now=now))
        self._accounts.evaluations.plan(0 if head is None else head.number)

    async def admit_learner(self, learner: Learner) -> None:
        """Make a learner the run's; end the stream of an older one. See ``step_history.learner_joins``."""
        await self._settle(lambda _: step_history.learner_joins(self._accounts, learner), is_last=True)
        if self._drain is not None and self._drain.learner_epoch < learner.epoch:
            self._drain.end(_fenced())

    async def announce(self, versions: tuple[PolicyVersion, ...]) -> None:
        """Log versions that were announced; those known already are passed over."""

        def decide(now: float) -> Decision[None]:
            known = self._accounts.versions
            fresh = (version for version in versions if version.number not in known)
            announced = tuple(Announced(version.number, version.root, now) for version in fresh)
            return Decision(None, Transaction(announced=announced))

        await self._settle(decide)

    async def open_drain(self, hello: Hello) -> DrainStream:
        """Begin a learner's stream and end the one before it; see ``step_history.drain_opens``.

        A learner that is refused ends nobody's stream, and nothing of what it said is taken.
        """
        outcome = await self._settle(lambda _: step_history.drain_opens(self._accounts, hello), is_last=True)
        self._show(outcome)
        if outcome.accepted_loss:
            logger.error(
                "steps lost with an older ledger, as accepted",
                extra={"first": outcome.accepted_loss[0], "last": outcome.accepted_loss[-1]},
            )
        self._accounts.confirm()
        if self._drain is not None:
            self._drain.end(_fenced())
        self._accounts.slots.deliver_anew(frozenset(hello.held_group_ids))
        drain = self._drain = DrainStream(learner_epoch=hello.epoch)
        drain.has_orders = bool(self._accounts.orders.for_learner())
        drain.has_pardons, self._has_pardons = self._has_pardons, False
        if hello.records:
            drain.acknowledgement = hello.version
        return drain

    async def deliver(
        self, drain: DrainStream
    ) -> AsyncIterator[EncodedGroup | int | Quarantines | OrdersTold]:
        """Yield what the learner is to be sent: orders, quarantines, groups, versions whose records are on
        disk."""
        drain.has_quarantines = True
        while not drain.is_ended:
            if drain.has_orders:
                drain.has_orders = False
                yield self._accounts.orders.for_learner()
            elif drain.has_quarantines or drain.has_pardons:
                told = Quarantines(self._accounts.standings.quarantined(), releases_others=drain.has_pardons)
                drain.has_quarantines = drain.has_pardons = False
                if told.samplers or told.releases_others:
                    yield told
            elif drain.acknowledgement is not None:
                version, drain.acknowledgement = drain.acknowledgement, None
                yield version
            elif drain.credits and (slot := self._accounts.next_undelivered()) is not None:
                drain.credits -= 1
                stored = await self._transactions.read(slot)
                if stored is None:
                    drain.credits += 1
                else:
                    yield stored
            else:
                await drain.wait()
        if drain.refusal is not None:
            raise drain.refusal

    def wake_drain(self, *, has_quarantines: bool = False) -> None:
        """Let the learner's stream look for groups to deliver, and tell it who is quarantined."""
        if self._drain is not None:
            self._drain.has_quarantines |= has_quarantines
            self._drain.wake()

    async def judge(self, drain: DrainStream, judged: GroupVerdict) -> None:
        """Apply the learner's verdict on a group, unless a newer stream may have delivered it again."""

        def decide(now: float) -> Decision[Judged | None]:
            return Decision(None) if drain.is_ended else verdicts.judgement(self._accounts, judged, now=now)

        answer = await self._settle(decide)
        if answer is None:
            return
        self._metrics.groups.labels(judged.verdict).inc()
        if judged.verdict is Verdict.DUPLICATE:
            self._metrics.doubled_deliveries.inc()
            logger.error("learner had trained on a group before", extra={"group_id": judged.group_id})
        if answer.spooled_at_s is not None:
            self._metrics.observe_lag("delivered", self._clock.now() - answer.spooled_at_s)
        self._notify(answer.sampler_id, judged)

    async def record_step(self, drain: DrainStream, record: StepRecord) -> None:
        """Put a step on disk and acknowledge it.

        Raises:
            RefusedError: DUPLICATE; a group was trained on twice. LEDGER_BEHIND; it names a group or follows
                on a step that the ledger does not know. FENCED. Nothing of the record was taken.
        """

        def decide(_: float) -> Decision[Outcome]:
            if drain.is_ended:  # by a newer stream, while this waited for its turn
                raise _fenced()
            return step_history.step(self._accounts, record)

        self._show(await self._settle(decide, is_last=True))  # a ledger that is behind leases nothing more
        drain.acknowledgement = record.version
        drain.wake()

    def _end_drain(self) -> None:
        """Ask the learner to say again which groups it holds: the accounts do not know any more."""
        if self._drain is not None:
            what = "the ledger could not be written, and the coordinator has gone back to what it holds"
            self._drain.end(RefusedError(Reason.DISK, what, fix="connect again"))

    def _observe_lags(self, sampler_id: str, group: GroupTerms) -> None:
        now = self._clock.now()
        lags = submission_lags(group, spooled_at_s=now)
        if not lags:
            logger.warning(
                "timestamps of a group are far from this clock",
                extra={
                    "sampler": sampler_id,
                    "group_id": group.group_id,
                    "sampling_started": moment(group.sampling_started_at_s),
                    "graded": moment(group.graded_at_s),
                    "now": moment(now),
                    "note": "its lag is not shown; set the sampler's clock, or this one",
                },
            )
        if self._accounts.work.verifiers_grade:
            lags.pop("graded", None)
        for stage, lag_s in lags.items():
            self._metrics.observe_lag(stage, lag_s)

    def _show(self, outcome: Outcome) -> None:
        """Count and log what step records did; raise where they were refused."""
        self._metrics.double_trainings.inc(len(outcome.doubled))
        self._metrics.unknown_trainings.inc(len(outcome.unknown))
        refusal = outcome.refusal
        if refusal is not None:
            named = (*outcome.doubled, *outcome.unknown)
            logger.error(
                "step trained on settled groups" if outcome.doubled else "ledger is behind the learner",
                extra={"detail": str(refusal), "groups": len(named), "first": next(iter(named), "")},
            )
            if refusal.reason is Reason.LEDGER_BEHIND:
                self._accounts.doubt(outcome.gap)
            raise refusal
        for record in outcome.recorded:
            logger.info("step recorded", extra={"version": record.version, "groups": len(record.group_ids)})
        now = self._clock.now()
        for trained in outcome.trained:
            self._metrics.groups.labels(Verdict.TRAINED).inc()
            self._metrics.staleness.observe(trained.staleness_versions)
            if trained.spooled_at_s is not None:
                self._metrics.observe_lag("trained", now - trained.spooled_at_s)
            self._notify(trained.sampler_id, GroupVerdict(trained.group_id, Verdict.TRAINED))


def _with_rows(leases: tuple[PromptLease, ...], rows: Rows) -> tuple[PromptLease, ...]:
    return tuple(replace(lease, row=rows.row(lease.prompt_index)) for lease in leases)


def _fenced() -> RefusedError:
    return RefusedError(
        Reason.FENCED,
        "another stream of the run's learner has taken over",
        fix="a run has one learner: stop the other process",
    )
