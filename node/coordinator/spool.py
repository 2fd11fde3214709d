"""The durable rollout spool: decide, persist, apply, answer; in that order, one at a time.

    rpc --decision--> ledger thread (fsync) --> accounts --> answer, metrics, verdict for the sampler
                                                   |
                                                   '--> the learner's stream wakes

Whoever called may go away meanwhile: a transaction that was begun is always finished, so that
memory and disk never tell different stories.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from node.clock import Clock
from node.coordinator.drain_stream import Drain
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.work import decisions, history, lease_returns
from node.coordinator.work.accounts import Accounts, StoredGroup, Transaction
from node.coordinator.work.buffer_room import Bounds, Capacity, Learner, Work, capacities, capacity
from node.coordinator.work.decisions import NOTHING, Decision, Submitted
from node.coordinator.work.history import Hello, Outcome
from node.coordinator.work.slots import Slot, SlotState
from node.coordinator.work.versions import Announced
from node.errors import Reason, RefusedError
from node.failure import FailedLease
from node.policy import PolicyVersion
from node.rollout import GroupVerdict, LeaseGrant, RolloutGroup, Verdict
from node.run import StepRecord
from node.telemetry.lag import submission_lags

logger = logging.getLogger(__name__)

WAITING_TRANSACTIONS: Final = 4096
"""Callers that may wait for the ledger; more are told to come back. A second of a slow disk's work."""

Answer = TypeVar("Answer")
Tell = Callable[[str, GroupVerdict], None]
"""Lets a sampler know what became of its group."""


class Spool:
    """Leases out, groups in, groups on to the learner."""

    def __init__(
        self,
        ledger: Ledger,
        accounts: Accounts,
        *,
        work: Work,
        bounds: Bounds,
        lease_ttl_s: float,
        is_published: Callable[[int], bool],
        tell: Tell,
        metrics: CoordinatorMetrics,
        clock: Clock,
    ) -> None:
        """Take over ``ledger``, and ``accounts`` made from its balance."""
        self._ledger = ledger
        self._accounts = accounts
        self._work = work
        self._bounds = bounds
        self._lease_ttl_s = lease_ttl_s
        self._is_published = is_published
        self._tell = tell
        self._metrics = metrics
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        self._turn = asyncio.Lock()
        self._transactions: set[asyncio.Task[Any]] = set()
        self._drain: Drain | None = None
        for verdict, n in accounts.verdicts().items():
            metrics.count_verdict(verdict, n)

    @property
    def accounts(self) -> Accounts:
        """What the ledger adds up to; to be read only."""
        return self._accounts

    @property
    def capacity(self) -> Capacity:
        """How many groups could be leased now."""
        if waits_for := decisions.unconfirmed(self._accounts):
            return Capacity(0, waits_for)
        prompts = self._accounts.book.prompts
        if prompts is None:
            return Capacity(0, "task")
        if self._accounts.prompts.are_all_aside(prompts, now=self._clock.now()):
            return Capacity(0, "prompts")
        return capacity(self._bounds, self._accounts.load())

    async def close(self) -> None:
        """Finish what was begun and close the ledger."""
        if self._transactions:
            await asyncio.wait(self._transactions)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._ledger.close)
        self._thread.shutdown()

    async def lease(self, sampler_id: str, wanted: int, held: PolicyVersion | None) -> LeaseGrant:
        """Lease prompts to a sampler that will sample them with ``held`` or newer."""
        return await self._settle(
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

    async def release(
        self, sampler_id: str, lease_ids: tuple[str, ...], failed: tuple[FailedLease, ...] = ()
    ) -> int:
        """Take leases back, unbegun or ``failed``; gives how many of them the sampler held."""
        released = await self._settle(
            lambda now: lease_returns.release(
                self._accounts, sampler_id=sampler_id, lease_ids=lease_ids, failed=failed, now=now
            )
        )
        for fault in released.faults:
            self._metrics.count_prompt_fault(fault)
        return released.leases

    async def admit_sampler(self, sampler_id: str, *, configured: int | None, prompts: int) -> None:
        """Let a sampler in that found ``prompts`` prompts in the run's task; 0: it does not know yet.

        Raises:
            RefusedError: see ``decisions.sampler_joins``.
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
        """Give leases a full term; names those whose work is in vain."""
        return self._accounts.book.renew(sampler_id, lease_ids, now=self._clock.now())

    async def expire(self) -> None:
        """End the leases whose time is up."""
        expired = await self._settle(lambda now: decisions.expiry(self._accounts, now))
        if expired:
            self._metrics.lease_expiries.inc(expired)
            logger.info("leases expired", extra={"leases": expired})

    async def submit(
        self, sampler_id: str, name: str, group: RolloutGroup | RefusedError, data: bytes
    ) -> Submitted:
        """Take a group, or say why not; what is SPOOLED is on disk.

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
        self._metrics.count_verdict(submitted.verdict)
        if submitted.verdict is Verdict.SPOOLED and isinstance(group, RolloutGroup):
            for stage, lag_s in submission_lags(group, spooled_at_s=self._clock.now()).items():
                self._metrics.observe_lag(stage, lag_s)
            self._wake_drain()
        elif submitted.verdict is not Verdict.DUPLICATE:
            logger.warning(
                "group refused",
                extra={"sampler": sampler_id, "verdict": submitted.verdict, "detail": submitted.detail},
            )
        return submitted

    async def admit_learner(self, learner: Learner) -> None:
        """Let a learner be the run's; an older one's stream ends.

        Raises:
            RefusedError: see ``history.learner_joins``.
        """
        await self._settle(lambda _: history.learner_joins(self._accounts, learner))
        if self._drain is not None and self._drain.learner_epoch < learner.epoch:
            self._drain.end(_fenced())

    async def announce(self, versions: tuple[PolicyVersion, ...]) -> None:
        """Note versions that were announced; those known already are passed over."""

        def decide(now: float) -> Decision[None]:
            known = self._accounts.versions
            fresh = (version for version in versions if version.number not in known)
            announced = tuple(Announced(version.number, version.root, now) for version in fresh)
            return Decision(None, Transaction(announced=announced))

        await self._settle(decide)

    async def open_drain(self, hello: Hello) -> Drain:
        """Begin a learner's stream; ends the one before it.

        Whoever is refused ends nobody's stream, and nothing of what it said is taken.

        Raises:
            RefusedError: see ``history.drain_opens``; DUPLICATE; LEDGER_BEHIND.
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
        drain = self._drain = Drain(hello.held_group_ids, learner_epoch=hello.epoch)
        if hello.records:
            drain.acknowledge(hello.version)
        return drain

    async def deliver(self, drain: Drain) -> AsyncIterator[StoredGroup | int]:
        """Give what the learner is to be sent: groups, and versions up to which records are on disk."""
        while not drain.is_ended:
            version = drain.take_acknowledgement()
            if version is not None:
                yield version
                continue
            slot = drain.next_slot(self._accounts.book.untrained())
            if slot is None:
                await drain.wait()
                continue
            stored = await self._read(slot)
            if stored is None:
                drain.put_back_credit()
            else:
                yield stored
        refusal = drain.take_refusal()
        if refusal is not None:
            raise refusal

    async def judge(self, judgement: GroupVerdict) -> None:
        """Take the learner's verdict on a group.

        Raises:
            RefusedError: MALFORMED.
        """
        judged = await self._settle(lambda _: decisions.judgement(self._accounts, judgement))
        if judged is None:
            return
        self._metrics.count_verdict(judgement.verdict)
        if judgement.verdict is Verdict.DUPLICATE:
            self._metrics.doubled_deliveries.inc()
            logger.error("learner had trained on a group before", extra={"group_id": judgement.group_id})
        if judged.delivered_since_s is not None:
            self._metrics.observe_lag("delivered", self._clock.now() - judged.delivered_since_s)
        self._tell(judged.sampler_id, judgement)

    async def record_step(self, drain: Drain, record: StepRecord) -> None:
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
            self._accounts.book.counts(), capacities(self._bounds, load), learner_version=load.version
        )
        self._metrics.show_ledger(
            is_confirmed=self._accounts.is_confirmed,
            is_behind=bool(self._accounts.gap),
            lost_steps=self._accounts.lost_steps,
        )
        self._metrics.bad_prompts.set(self._accounts.prompts.aside(self._clock.now()))

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
            self._metrics.count_verdict(Verdict.TRAINED)
            self._metrics.observe_staleness(trained.staleness_versions)
            if trained.spooled_at_s is not None:
                self._metrics.observe_lag("trained", now - trained.spooled_at_s)
            self._tell(trained.sampler_id, GroupVerdict(trained.group_id, Verdict.TRAINED))

    async def _read(self, slot: Slot) -> StoredGroup | None:
        """Give a slot's group; None where it is gone meanwhile, or damaged: then it is sampled again."""
        loop = asyncio.get_running_loop()
        try:
            stored = await loop.run_in_executor(self._thread, self._ledger.group, slot.number)
            return stored if stored is not None and stored.attempt == slot.winner else None
        except RefusedError as refused:
            logger.error("group damaged in the spool", extra={"slot": slot.number, "detail": str(refused)})
        self._metrics.damaged_groups.inc()

        def give_up(_: float) -> Decision[None]:
            again = self._accounts.book.refused(slot.number, slot.winner)
            return Decision(None, Transaction(slots=() if again is None else (again,)))

        await self._settle(give_up)
        return None

    async def _settle(self, decide: Callable[[float], Decision[Answer]]) -> Answer:
        if len(self._transactions) >= WAITING_TRANSACTIONS:
            raise RefusedError(
                Reason.BUSY, f"{WAITING_TRANSACTIONS} requests wait for the ledger", fix="try again later"
            )
        task = asyncio.create_task(self._transact(decide))
        self._transactions.add(task)
        task.add_done_callback(self._transactions.discard)
        return await asyncio.shield(task)

    async def _transact(self, decide: Callable[[float], Decision[Answer]]) -> Answer:
        async with self._turn:
            now = self._clock.now()
            decision = decide(now)
            if decision.transaction != NOTHING:
                started_s = self._clock.monotonic()
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._thread, self._ledger.record, decision.transaction)
                self._metrics.observe_transaction(self._clock.monotonic() - started_s)
                self._accounts.apply(decision.transaction, now=now)
                self._note_abandoned(decision.transaction)
            return decision.answer

    def _note_abandoned(self, transaction: Transaction) -> None:
        bad = {entry.slot: entry for entry in transaction.bad_prompts}
        for slot in transaction.slots:
            if slot.state is not SlotState.ABANDONED or (reason := slot.last_failure) is None:
                continue
            self._metrics.count_abandoned(reason)
            entry = bad.get(slot.number)
            logger.warning(
                "prompt abandoned",
                extra={
                    "prompt_index": slot.prompt_index,
                    "slot": slot.number,
                    "attempts": slot.granted,
                    "reason": reason,
                    "detail": "" if entry is None else entry.detail,
                    "times": 0 if entry is None else entry.times,
                    "retry_in_s": 0.0 if entry is None else entry.retry_at_s - entry.at_s,
                },
            )

    def _wake_drain(self) -> None:
        if self._drain is not None:
            self._drain.wake()


def _fenced() -> RefusedError:
    return RefusedError(Reason.FENCED, "another stream of the run's learner has taken over")
