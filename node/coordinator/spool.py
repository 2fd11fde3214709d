"""The durable rollout spool: leases out, groups in, groups on to the learner.

What a caller is answered is on disk: see ``transactions``. What a decision may be is in ``work``; this is its
shell, with the metrics and the log, and the one stream that a learner drains.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TypeAlias

from node.clock import Clock
from node.coordinator.data.rows import Rows
from node.coordinator.drain_stream import DrainStream
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.transactions import Transactions
from node.coordinator.work import decisions, history, lease_returns
from node.coordinator.work.accounts import Accounts, StoredGroup, Transaction
from node.coordinator.work.capacity import Bounds, Capacity, capacities
from node.coordinator.work.decisions import Decision, Submitted
from node.coordinator.work.evaluation.evaluations import is_evaluation_lease
from node.coordinator.work.group_check import Work
from node.coordinator.work.history import Hello, Outcome
from node.coordinator.work.model_check import Learner
from node.coordinator.work.version_log import Announced
from node.errors import Reason, RefusedError
from node.failure import FailedLease
from node.limits import LEASED_ROWS_BYTES
from node.policy import PolicyVersion
from node.rollout import GroupVerdict, LeaseGrant, PromptLease, RolloutGroup, Verdict
from node.run import StepRecord
from node.telemetry.lag import submission_lags

logger = logging.getLogger(__name__)

Notify: TypeAlias = Callable[[str, GroupVerdict], None]
"""Reports to a sampler what became of its group."""


class Spool:
    """One run's; used on the event loop's thread."""

    def __init__(
        self,
        ledger: Ledger,
        accounts: Accounts,
        *,
        work: Work,
        rows: Rows | None = None,
        bounds: Bounds,
        lease_ttl_s: float,
        is_published: Callable[[int], bool],
        notify: Notify,
        metrics: CoordinatorMetrics,
        clock: Clock,
    ) -> None:
        """Serve a run from ``ledger``, ``accounts`` made from its balance, and ``rows``, if it has data."""
        self._transactions = Transactions(ledger, accounts, metrics=metrics, clock=clock)
        self._settle = self._transactions.settle
        self._accounts = accounts
        self._work = work
        self._rows = rows
        self._bounds = bounds
        self._lease_ttl_s = lease_ttl_s
        self._is_published = is_published
        self._notify = notify
        self._metrics = metrics
        self._clock = clock
        self._drain: DrainStream | None = None
        for verdict, n in accounts.verdicts().items():
            metrics.groups.labels(verdict).inc(n)

    @property
    def accounts(self) -> Accounts:
        """What the ledger adds up to; to be read only."""
        return self._accounts

    @property
    def capacity(self) -> Capacity:
        """How many groups could be leased now."""
        return decisions.room(self._accounts, self._bounds, now=self._clock.now())

    async def close(self) -> None:
        """Finish what was begun and close the ledger and the data."""
        await self._transactions.close()
        if self._rows is not None:
            self._rows.close()

    async def lease(self, sampler_id: str, wanted: int, held: PolicyVersion | None) -> LeaseGrant:
        """Lease prompts to a sampler that will sample them with ``held`` or newer.

        Raises:
            RefusedError: DISK; a row cannot be read. Nothing was leased.
        """
        if self._rows is not None:
            wanted = min(wanted, max(1, LEASED_ROWS_BYTES // self._rows.longest_bytes))
        if held is not None and self._accounts.evaluations.is_due(held.number):
            await self._settle(lambda now: decisions.evaluation_begins(self._accounts, held, now=now))
        grant = await self._settle(
            lambda now: decisions.lease(
                self._accounts,
                self._work,
                self._bounds,
                sampler_id=sampler_id,
                wanted=wanted,
                held=held,
                ttl_s=self._lease_ttl_s,
                now=now,
            )
        )
        if self._rows is None or not grant.leases:
            return grant
        try:
            leases = await asyncio.to_thread(_with_rows, grant.leases, self._rows)
        except RefusedError as error:
            logger.error("row not read", extra={"detail": str(error)})
            await self.release(sampler_id, tuple(lease.lease_id for lease in grant.leases))
            raise
        return replace(grant, leases=leases)

    async def release(
        self, sampler_id: str, lease_ids: tuple[str, ...], failed: tuple[FailedLease, ...] = ()
    ) -> int:
        """Release leases, unbegun or ``failed``; return how many of them the sampler held."""
        released = await self._settle(
            lambda now: lease_returns.release(
                self._accounts, sampler_id=sampler_id, lease_ids=lease_ids, failed=failed, now=now
            )
        )
        for fault in released.faults:
            self._metrics.prompt_faults.labels(fault).inc()
        return released.leases

    async def admit_sampler(self, sampler_id: str, *, configured: int | None, prompts: int) -> None:
        """Admit a sampler that found ``prompts`` prompts in the run's task; 0: it does not know yet.

        Raises:
            RefusedError: See ``decisions.sampler_joins``.
        """
        await self._settle(
            lambda _: decisions.sampler_joins(
                self._accounts,
                sampler_id=sampler_id,
                task=self._work.task,
                configured=configured,
                prompts=prompts,
            )
        )

    def renew(self, sampler_id: str, lease_ids: tuple[str, ...]) -> tuple[str, ...]:
        """Extend leases to a full term; return those whose work is in vain."""
        return self._accounts.renew(sampler_id, lease_ids, now=self._clock.now())

    async def expire(self) -> None:
        """End the leases whose time is up."""
        expired = await self._settle(lambda now: decisions.expiry(self._accounts, now))
        if expired:
            self._metrics.lease_expiries.inc(expired)
            logger.info("leases expired", extra={"leases": expired})

    async def submit(
        self, sampler_id: str, name: str, group: RolloutGroup | RefusedError, data: bytes
    ) -> Submitted:
        """Accept a group, or return why not; what is SPOOLED is on disk.

        Raises:
            RefusedError: BUSY where the spool is full, DISK where it cannot be written.
        """

        def decide(now: float) -> Decision[Submitted]:
            return decisions.submission(
                self._accounts,
                self._work,
                sampler_id=sampler_id,
                name=name,
                group=group,
                data=data,
                is_published=self._is_published,
                buffer_groups=self._bounds.buffer_groups,
                now=now,
            )

        submitted = await self._settle(decide)
        is_for_training = not is_evaluation_lease(name)
        groups = self._metrics.groups if is_for_training else self._metrics.evaluation_groups
        groups.labels(submitted.verdict).inc()
        if submitted.verdict is Verdict.SPOOLED and is_for_training and isinstance(group, RolloutGroup):
            for stage, lag_s in submission_lags(group, spooled_at_s=self._clock.now()).items():
                self._metrics.observe_lag(stage, lag_s)
            if self._drain is not None:
                self._drain.wake()
        elif submitted.verdict not in (Verdict.SPOOLED, Verdict.DUPLICATE):
            logger.warning(
                "group refused",
                extra={"sampler": sampler_id, "verdict": submitted.verdict, "detail": submitted.detail},
            )
        return submitted

    async def evaluate(self, head: PolicyVersion | None) -> None:
        """End the evaluation that is over, and plan the next; ``head`` is the newest announced version."""
        await self._settle(lambda now: decisions.evaluation_ends(self._accounts, now=now))
        self._accounts.evaluations.plan(0 if head is None else head.number)

    async def admit_learner(self, learner: Learner) -> None:
        """Make a learner the run's, and end the stream of an older one.

        Raises:
            RefusedError: See ``history.learner_joins``.
        """
        await self._settle(lambda _: history.learner_joins(self._accounts, learner))
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
        """Begin a learner's stream and end the one before it.

        Whoever is refused ends nobody's stream, and nothing of what it said is taken.

        Raises:
            RefusedError: See ``history.drain_opens``; DUPLICATE; LEDGER_BEHIND.
        """
        outcome = await self._settle(lambda _: history.drain_opens(self._accounts, hello))
        self._show(outcome)
        if outcome.accepted_loss:
            logger.error(
                "steps lost with an older ledger, as accepted",
                extra={"first": outcome.accepted_loss[0], "last": outcome.accepted_loss[-1]},
            )
        self._accounts.confirm()
        if self._drain is not None:
            self._drain.end(_fenced())
        drain = self._drain = DrainStream(hello.held_group_ids, learner_epoch=hello.epoch)
        if hello.records:
            drain.acknowledge(hello.version)
        return drain

    async def deliver(self, drain: DrainStream) -> AsyncIterator[StoredGroup | int]:
        """Yield what the learner is to be sent: groups, and versions up to which records are on disk."""
        while not drain.is_ended:
            version = drain.take_acknowledgement()
            if version is not None:
                yield version
                continue
            slot = drain.next_slot(self._accounts.slots.untrained())
            if slot is None:
                await drain.wait()
                continue
            stored = await self._transactions.read(slot)
            if stored is None:
                drain.put_back_credit()
            else:
                yield stored
        refusal = drain.take_refusal()
        if refusal is not None:
            raise refusal

    async def judge(self, judged: GroupVerdict) -> None:
        """Apply the learner's verdict on a group.

        Raises:
            RefusedError: MALFORMED.
        """
        answer = await self._settle(lambda _: decisions.judgement(self._accounts, judged))
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
            return history.step(self._accounts, record)

        self._show(await self._settle(decide))
        drain.acknowledge(record.version)

    def show_load(self) -> None:
        """Show in the metrics what is in flight."""
        load = self._accounts.load()
        self._metrics.show_load(
            self._accounts.slots.counts(), capacities(self._bounds, load), learner_version=load.version
        )
        self._metrics.show_ledger(
            is_confirmed=self._accounts.is_confirmed,
            is_behind=bool(self._accounts.gap),
            lost_steps=self._accounts.lost_steps,
        )
        self._metrics.bad_prompts.set(self._accounts.bad_prompts.aside(self._clock.now()))
        self._metrics.show_evaluations(self._accounts.evaluations.status)

    def _show(self, outcome: Outcome) -> None:
        """Count and log what step records did; raise where they were refused."""
        self._metrics.double_trainings.inc(len(outcome.doubled))
        self._metrics.unknown_trainings.inc(len(outcome.unknown))
        self._metrics.lost_trainings.inc(len(outcome.lost))
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
