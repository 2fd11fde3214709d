"""The learner's stream: groups to it by its credits, what it says of them into the ledger in its order.

    hello --the same history?--> open; the stream before it ends
    orders, quarantines, groups, versions whose records are on disk   -->  the learner
    credits, verdicts, step records, samplers that mismatch, answers  <--  the learner

A run has one stream. What an older one still says is not taken.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from node.coordinator.transactions.run_ledger import RunLedger
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.decisions import judged_groups, step_history
from node.coordinator.work.decisions.decision import Decision
from node.coordinator.work.decisions.findings import Checked
from node.coordinator.work.decisions.judged_groups import Judged
from node.coordinator.work.decisions.step_history import Hello, Outcome
from node.coordinator.work.decisions.submitted_groups import Submitted
from node.coordinator.work.decisions.trust import Quarantine, quarantine
from node.coordinator.work.orders.order_decisions import Answered, answered
from node.coordinator.work.samplers.sampler_standing import Standing
from node.coordinator.work.terms.model_check import Learner
from node.errors import Reason, RefusedError
from node.values.groups.rollout import EncodedGroup
from node.values.groups.verdict import GroupVerdict, Verdict
from node.values.operator_order import Order, OrderAnswer
from node.values.run import StepRecord

_CREDITS: Final = 1 << 20
"""Room no learner has; a larger sum is a mistake or an attack."""

Said: TypeAlias = int | GroupVerdict | StepRecord | Quarantine | OrderAnswer
"""After its hello a learner says: credits, a verdict, a step, a sampler that mismatches, what became of an
order."""


@dataclass(frozen=True, slots=True)
class Quarantines:
    samplers: tuple[Standing, ...]
    releases_others: bool
    """Whether an operator has pardoned others."""


@dataclass(frozen=True, slots=True)
class OrdersTold:
    """All of the operators' orders to the learner that hold or have no answer."""

    orders: tuple[Order, ...]


class LearnerStream:
    """One stream: how much may be sent on it, and what is to be told."""

    def __init__(self, *, learner_epoch: int) -> None:
        self.learner_epoch = learner_epoch
        self.credits = 0
        self.acknowledgement: int | None = None
        """The newest version to acknowledge: its records are on disk."""
        self.has_quarantines = self.has_orders = True
        """Whether the learner is to be told who is quarantined, or what operators order it."""
        self.is_ended = False
        self.refusal: RefusedError | None = None
        self._wake = asyncio.Event()

    def add_credits(self, groups: int) -> None:
        """Note room for more groups. Raises RefusedError: MALFORMED; no learner has so much room."""
        if not 0 < groups <= _CREDITS - self.credits:
            raise RefusedError(
                Reason.MALFORMED,
                f"a credit of {groups} groups on top of {self.credits}, at most {_CREDITS} are allowed",
            )
        self.credits += groups
        self.wake()

    def end(self, refusal: RefusedError | None = None) -> None:
        if not self.is_ended:
            self.is_ended, self.refusal = True, refusal
            self.wake()

    def wake(self) -> None:
        self._wake.set()

    async def wait(self) -> None:
        await self._wake.wait()
        self._wake.clear()


class LearnerStreams:
    """The run's stream, and those that it replaced."""

    def __init__(self, ledger: RunLedger) -> None:
        self._ledger = ledger
        self._accounts = ledger.accounts
        self._current: LearnerStream | None = None
        self._has_pardons = False
        """Whether an operator has pardoned samplers since a learner was told so."""
        ledger.went_back = self._ask_anew
        ledger.when(Submitted, self._note_submitted)
        ledger.when(Checked, lambda checked: self.wake(has_quarantines=bool(checked.proof)))

    async def admit(self, learner: Learner) -> None:
        """Make a learner the run's; end the stream of an older one. See ``step_history.learner_joins``."""
        await self._ledger.decide(partial(step_history.learner_joins, request=learner))
        if self._current is not None and self._current.learner_epoch < learner.epoch:
            self._current.end(_fenced())

    async def open(self, hello: Hello) -> LearnerStream:
        """Begin a learner's stream and end the one before it; see ``step_history.drain_opens``.

        A learner that is refused ends nobody's stream, and nothing of what it said is taken.
        """
        self._check(await self._ledger.decide(partial(step_history.drain_opens, request=hello)))
        self._accounts.confirm()
        if self._current is not None:
            self._current.end(_fenced())
        self._accounts.slots.open.deliver_anew(frozenset(hello.held_group_ids))
        stream = self._current = LearnerStream(learner_epoch=hello.epoch)
        if hello.records:
            stream.acknowledgement = hello.version
        return stream

    async def deliver(
        self, stream: LearnerStream
    ) -> AsyncGenerator[EncodedGroup | int | Quarantines | OrdersTold]:
        """Yield what the learner is to be sent; a number: the version whose records are on disk."""
        while not stream.is_ended:
            if stream.has_orders:
                stream.has_orders = False
                if orders := self._accounts.orders.for_learner():
                    yield OrdersTold(orders)
            elif stream.has_quarantines or self._has_pardons:
                told = Quarantines(self._accounts.standings.quarantined(), releases_others=self._has_pardons)
                stream.has_quarantines = self._has_pardons = False
                if told.samplers or told.releases_others:
                    yield told
            elif stream.acknowledgement is not None:
                version, stream.acknowledgement = stream.acknowledgement, None
                yield version
            elif stream.credits and (slot := self._accounts.next_undelivered()) is not None:
                stream.credits -= 1
                stored = await self._ledger.group(slot)
                if stored is None:
                    stream.credits += 1
                else:
                    yield stored
            else:
                await stream.wait()
        if stream.refusal is not None:
            raise stream.refusal

    @property
    def is_open(self) -> bool:
        """Whether a learner is there."""
        return self._current is not None and not self._current.is_ended

    def wake(
        self, *, has_quarantines: bool = False, has_pardons: bool = False, has_orders: bool = False
    ) -> None:
        """Let the stream look for what to deliver: groups, and of what there is news."""
        self._has_pardons |= has_pardons
        if self._current is not None:
            self._current.has_quarantines |= has_quarantines
            self._current.has_orders |= has_orders
            self._current.wake()

    async def hear(self, stream: LearnerStream, said: Said) -> None:
        """Take what the learner says on a stream.

        Raises:
            RefusedError: MALFORMED. Of a step: DUPLICATE, where a group was trained on twice; LEDGER_BEHIND,
                where it names a group or follows on a step that the ledger does not know; FENCED. Nothing was
                taken.
        """
        match said:
            case int():
                stream.add_credits(said)
            case GroupVerdict():
                await self._ledger.decide(partial(_judgement, stream, said))
            case StepRecord():
                self._check(await self._ledger.decide(partial(_step, stream, said)))
                stream.acknowledgement = said.version
                stream.wake()
            case Quarantine():
                await self._ledger.decide(partial(quarantine, request=said))
            case OrderAnswer():
                await self._ledger.decide(partial(_answer, stream, said))

    def _check(self, outcome: Outcome) -> None:
        if (refusal := outcome.refusal) is not None:
            if refusal.reason is Reason.LEDGER_BEHIND:
                self._accounts.doubt(outcome.gap)
            raise refusal

    def _note_submitted(self, submitted: Submitted) -> None:
        if submitted.verdict is Verdict.SPOOLED:
            self.wake()

    def _ask_anew(self) -> None:
        """Ask the learner to say again which groups it holds: the accounts do not know any more."""
        if self._current is not None:
            what = "the ledger could not be written, and the coordinator has gone back to what it holds"
            self._current.end(RefusedError(Reason.DISK, what, fix="connect again"))


def _judgement(
    stream: LearnerStream, judged: GroupVerdict, accounts: Accounts, /, *, now: float
) -> Decision[Judged | None]:
    """Apply a verdict, unless a newer stream may have delivered the group again."""
    return Decision(None) if stream.is_ended else judged_groups.judgement(accounts, judged, now=now)


def _answer(
    stream: LearnerStream, told: OrderAnswer, accounts: Accounts, /, *, now: float
) -> Decision[Answered | None]:
    """Note an answer to an order, unless a newer stream will tell of it."""
    return Decision(None) if stream.is_ended else answered(accounts, told, now=now)


def _step(
    stream: LearnerStream, record: StepRecord, accounts: Accounts, /, *, now: float
) -> Decision[Outcome]:
    """Record a step, unless a newer stream has begun while this waited for its turn."""
    if stream.is_ended:
        raise _fenced()
    return step_history.step(accounts, record, now=now)


def _fenced() -> RefusedError:
    return RefusedError(
        Reason.FENCED,
        "another stream of the run's learner has taken over",
        fix="a run has one learner: stop the other process",
    )
