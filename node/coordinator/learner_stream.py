"""The learner's stream: groups to it by its credits, what it says of them into the ledger in its order.

    hello --the same history?--> open; the stream before it ends
    groups, quarantines, versions whose records are on disk  -->  the learner
    credits, verdicts, step records, samplers that mismatch  <--  the learner

A run has one stream. What an older one still says is not taken.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from typing import Final

from node.coordinator.run_ledger import RunLedger
from node.coordinator.work import step_history, verdicts
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.decision import Decision
from node.coordinator.work.findings import Checked
from node.coordinator.work.model_check import Learner
from node.coordinator.work.sampler_standing import Standing
from node.coordinator.work.step_history import Hello, Outcome
from node.coordinator.work.trust import Quarantine, quarantine
from node.coordinator.work.verdicts import Judged, Submitted
from node.errors import Reason, RefusedError
from node.rollout import EncodedGroup
from node.run import StepRecord
from node.verdict import GroupVerdict, Verdict

_CREDITS: Final = 1 << 20
"""Room no learner has; a larger sum is a mistake or an attack."""


@dataclass(frozen=True, slots=True)
class Quarantines:
    samplers: tuple[Standing, ...]
    releases_others: bool
    """Whether an operator has pardoned others."""


class LearnerStream:
    """One stream: how much may be sent on it, and what is to be told."""

    def __init__(self, *, learner_epoch: int) -> None:
        self.learner_epoch = learner_epoch
        self.credits = 0
        self.acknowledgement: int | None = None
        """The newest version to acknowledge: its records are on disk."""
        self.has_quarantines = True
        self.has_pardons = False
        """Whether the learner is to be told who is quarantined: there are new ones, or an operator has
        pardoned others."""
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

    async def deliver(self, stream: LearnerStream) -> AsyncGenerator[EncodedGroup | int | Quarantines]:
        """Yield what the learner is to be sent: groups, quarantines, versions whose records are on disk."""
        while not stream.is_ended:
            if stream.has_quarantines or stream.has_pardons:
                told = Quarantines(self._accounts.standings.quarantined(), releases_others=stream.has_pardons)
                stream.has_quarantines = stream.has_pardons = False
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

    def wake(self, *, has_quarantines: bool = False, has_pardons: bool = False) -> None:
        """Let the stream look for groups to deliver, and tell the learner who is quarantined, or pardoned."""
        if self._current is not None:
            self._current.has_quarantines |= has_quarantines
            self._current.has_pardons |= has_pardons
            self._current.wake()

    async def hear(self, stream: LearnerStream, said: int | GroupVerdict | StepRecord | Quarantine) -> None:
        """Take what the learner says on a stream: credits, a verdict, a step, a sampler that mismatches.

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
    return Decision(None) if stream.is_ended else verdicts.judgement(accounts, judged, now=now)


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
