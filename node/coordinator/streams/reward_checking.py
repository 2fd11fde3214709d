"""Groups to verifiers, findings back; what is drawn and what a finding proves is in ``work.reward_checks``.

Any number of verifiers share the groups that wait; ``work.verifier_places`` shares each one's places out by
sampler. What a stream that ends leaves goes to the next verifier at once, and so does, after a while, what a
verifier has that does not answer. When the last has ended or fallen silent, every group is delivered
unchecked and checked afterwards, or waits for the next verifier where one is required.

Where verifiers grade, groups come by the same stream without rewards, and the findings are their grades.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from node.coordinator.data.rows import Rows
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.streams.learner_stream import LearnerStreams
from node.coordinator.transactions.run_ledger import RunLedger
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.checks.check_queue import Held
from node.coordinator.work.checks.verifier_places import GRADING_LIMIT_S, VerifierPlaces
from node.coordinator.work.decisions import findings
from node.coordinator.work.decisions.decision import Decision
from node.coordinator.work.decisions.findings import Checked, GroupFinding
from node.coordinator.work.decisions.submitted_groups import Submitted
from node.errors import Reason, RefusedError
from node.system.clock import Clock
from node.values.groups.failure import Failure
from node.values.groups.reward_finding import GroupGrades, RewardCheck, RewardFinding
from node.values.groups.rollout import EncodedGroup
from node.values.groups.verdict import Verdict
from node.values.run import Unusual
from node.wire.rollouts import graded

logger = logging.getLogger(__name__)

MOST_GROUPS: Final = 256
"""Groups that a verifier takes at once."""

MOST_GRADING_S: Final = 3600.0

NAMED: Final = 5
"""Peers that a line about checks names."""

MOST_NOISE: Final = 0.1
"""Share of an honest sampler's groups that a grader may grade otherwise the second time. A noisier one proves
nothing within a run."""


@dataclass(eq=False, slots=True)
class Verifier:
    """One stream."""

    node_id: str
    noise_ratio: float
    places: VerifierPlaces


class RewardChecking:
    """Used on the event loop's thread."""

    def __init__(
        self,
        ledger: RunLedger,
        learners: LearnerStreams,
        *,
        rows: Rows | None,
        metrics: CoordinatorMetrics,
        clock: Clock,
    ) -> None:
        self._ledger = ledger
        self._accounts = ledger.accounts
        self._checks = ledger.accounts.reward_checks
        self._learners = learners
        self._rows = rows
        self._metrics = metrics
        self._clock = clock
        self._verifiers: set[Verifier] = set()
        self._silent: set[Verifier] = set()
        self._unsettled: list[Held] = []
        """Groups to ask for again, because what was found could not be written or its stream has ended."""
        self._news = asyncio.Event()
        ledger.when(Submitted, self._note_submitted)
        ledger.when(Checked, self._let_go)
        metrics.verifiers.set_function(lambda: len(self._verifiers))

    def admit(
        self,
        node_id: str,
        *,
        task_digest: bytes,
        groups: int,
        noise_ratio: float,
        grades_at_once: int = 0,
        grading_limit_s: float = GRADING_LIMIT_S,
    ) -> Verifier:
        """Begin a verifier's stream; see ``VerifierHello``.

        Raises:
            RefusedError: MALFORMED; BUSY, where it grades by other options than the run's.
        """
        if not 1 <= groups <= MOST_GROUPS or not 0 <= noise_ratio <= MOST_NOISE:
            raise RefusedError(
                Reason.MALFORMED,
                f"a verifier that takes {groups} groups and differs in {noise_ratio} of them; allowed are "
                f"1 to {MOST_GROUPS}, and 0 to {MOST_NOISE}",
            )
        if grades_at_once < 0 or not 0 < grading_limit_s <= MOST_GRADING_S:
            raise RefusedError(
                Reason.MALFORMED,
                f"a verifier that grades {grades_at_once} groups at once, for {grading_limit_s} s at most; "
                f"allowed are 0 or more, and up to {MOST_GRADING_S:.0f} s",
            )
        if task_digest != self._accounts.work.task_digest:
            raise RefusedError(
                Reason.BUSY,
                f"the verifier grades by task options {task_digest.hex()}, the run's are "
                f"{self._accounts.work.task_digest.hex()}",
                fix="join again, and load the task as it is now",
            )
        places = VerifierPlaces(
            groups,
            grades_at_once=grades_at_once,
            grading_limit_s=grading_limit_s,
            is_patient=self._accounts.work.verifiers_grade,
        )
        verifier = Verifier(node_id, noise_ratio, places)
        self._verifiers.add(verifier)
        self._checks.verifiers.add(places)
        self._checks.open()
        self._learners.wake()
        logger.info("verifier checks rewards", extra={"verifier": node_id, "noise_ratio": noise_ratio})
        return verifier

    def dismiss(self, verifier: Verifier) -> None:
        """End a stream; without a verifier nothing is held back, or everything where one is required."""
        if verifier not in self._verifiers:
            return
        self._verifiers.discard(verifier)
        self._silent.discard(verifier)
        self._checks.verifiers.discard(verifier.places)
        self._checks.left(verifier.places.group_ids)
        self._news.set()
        self._note_whether_open(verifier)

    async def groups(self, verifier: Verifier) -> AsyncGenerator[tuple[EncodedGroup, bytes]]:
        """Yield the groups that a verifier is to check, each with its row."""
        while verifier in self._verifiers:
            held = None
            if verifier not in self._silent:
                held = self._checks.next(verifier.places, self._clock.now())
            if held is None:
                self._news.clear()
                await self._news.wait()
                continue
            group = await self._read(held)
            if group is None:
                verifier.places.take_back(held.group_id)
                self._checks.let_go(held)
                continue
            row = b"" if self._rows is None else await asyncio.to_thread(self._rows.row, held.prompt_index)
            yield group, row

    async def _read(self, held: Held) -> EncodedGroup | None:
        """Return the group to be checked; None where it is not there any more."""
        slot = self._accounts.slots.open_slots.get(held.slot)
        if slot is None:
            return await self._ledger.kept_group(held.slot, held.group_id)
        group = await self._ledger.group(slot)
        return group if group is not None and group.group_id == held.group_id else None

    async def note(self, verifier: Verifier, finding: RewardFinding) -> None:
        """Take in what a verifier found out about a group it was sent."""
        now = self._clock.now()
        has_had = verifier.places.answer(finding.group_id, now, graded_s=finding.graded_s)
        self._silent.discard(verifier)
        self._note_whether_open(verifier)
        self._news.set()
        is_final = finding.outcome in (RewardCheck.GRADED, RewardCheck.UNGRADABLE)
        if not has_had:
            return
        if not is_final and self._checks.put_off(finding.group_id, now):
            self._metrics.reward_checks.labels(finding.outcome).inc()
            about = {"group_id": finding.group_id, "verifier": verifier.node_id, "detail": finding.detail}
            logger.warning("group not graded; it is sent again", extra=about)
        elif (held := self._checks.answered(finding.group_id, now)) is not None:
            await self._settle(held, finding, noise_ratio=verifier.noise_ratio)

    async def _settle(self, held: Held, finding: RewardFinding, *, noise_ratio: float = 0.0) -> None:
        """Decide what a finding means. A stream that ends takes back no decision."""
        found = GroupFinding(held, finding, noise_ratio)
        is_decided = False

        def decide(accounts: Accounts, /, *, now: float) -> Decision[Checked]:
            nonlocal is_decided
            is_decided = True
            return findings.found(accounts, found, now=now)

        try:
            if finding.grades is not None:
                found = replace(found, graded=await self._graded(held, finding.grades))
            await self._ledger.decide(decide)
        except RefusedError as refused:
            self._unsettled.append(held)
            logger.error("finding not written", extra={"group_id": held.group_id, "detail": str(refused)})
        except asyncio.CancelledError:
            if not is_decided:
                self._unsettled.append(held)
            raise

    async def _graded(self, held: Held, grades: GroupGrades) -> EncodedGroup | None:
        """Return a group with its grades; None where it is not there any more.

        Raises:
            RefusedError: these are not grades of this group, or the ledger cannot be read.
        """
        slot = self._accounts.slots.open_slots.get(held.slot)
        group = None if slot is None else await self._ledger.group(slot)
        if group is None or group.group_id != held.group_id:
            return None
        now, digest = self._clock.now(), self._accounts.grader.digest
        self._metrics.observe_lag("graded", now - group.spooled_at_s)
        return graded(group, grades, grader_digest=digest, at_s=now)

    def _let_go(self, checked: Checked) -> None:
        is_checked = checked.found.finding.outcome is not RewardCheck.SKIPPED
        self._checks.let_go(checked.found.held, is_checked=is_checked)

    def _note_submitted(self, submitted: Submitted) -> None:
        if submitted.verdict is Verdict.SPOOLED:
            self._news.set()

    async def turn(self, now: float) -> None:
        """Ask again where findings were lost, ask others where a verifier is slow, hold late checks against
        samplers, and give up what nobody can grade."""
        for held in self._unsettled:
            self._checks.ask_again(held)
        self._unsettled.clear()
        self._checks.turn(now)
        for verifier in tuple(self._verifiers):
            for group_id in verifier.places.out_of_patience(now):
                self._checks.offer(group_id)
            for group_id in verifier.places.late(now):
                await self._note_late(verifier, group_id)
            if verifier.places.is_silent(now) and verifier not in self._silent:
                self._silent.add(verifier)
                has = {"verifier": verifier.node_id, "groups": len(verifier.places)}
                logger.warning("verifier answers nothing; its groups are sent to others", extra=has)
                self._note_whether_open(verifier)
        for held in self._checks.hopeless(now):
            what = "verifiers were sent it, and had gone, were silent, or were at it for too long"
            fault = Failure.GRADING_TIMED_OUT
            await self._settle(held, RewardFinding(held.group_id, RewardCheck.UNGRADABLE, what, fault))
        self._news.set()  # a run that leases nothing meanwhile brings no other news of what is sent again
        if self._accounts.slots.open.undelivered:  # a lease's end, too, may let newcomers' groups go
            self._learners.wake()
        for label, n in (("passed over", self._checks.passed_over), ("never", self._checks.unkept)):
            if n:
                self._metrics.reward_checks.labels(label).inc(n)
        self._checks.passed_over = self._checks.unkept = 0
        self._metrics.owed_checks.set(self._checks.owed)
        self._metrics.thinly_checked.set(len(self._checks.tally.thin()))

    @property
    def unusual(self) -> tuple[Unusual, ...]:
        """Matters of the checks that an operator should know of."""
        found = []
        if silent := sorted(one.node_id for one in self._silent):
            found.append(Unusual("verifier that answers nothing", len(silent), tuple(silent[:NAMED])))
        if self._verifiers and (thin := self._checks.tally.thin()):
            named = tuple(map(str, thin[:NAMED]))
            found.append(Unusual("rewards checked less than the run asks for", len(thin), named))
        return tuple(found)

    async def _note_late(self, verifier: Verifier, group_id: str) -> None:
        if (held := self._checks.turned_late(group_id)) is None:
            return
        self._metrics.reward_checks.labels("late").inc()
        about = {"sampler": held.sampler_id, "group_id": group_id, "verifier": verifier.node_id}
        logger.warning("check is late; its group waits, and it counts against the sampler", extra=about)
        try:
            await self._ledger.decide(partial(findings.check_late, request=held))
        except RefusedError as refused:
            logger.error("late check not written", extra={"group_id": group_id, "detail": str(refused)})

    def _note_whether_open(self, verifier: Verifier) -> None:
        """Note whether any verifier answers, after one has gone, fallen silent or answered again."""
        is_open = bool(self._verifiers - self._silent)
        if is_open == self._checks.is_open:
            return
        if is_open:
            self._checks.open()
            logger.info("a verifier answers again", extra={"verifier": verifier.node_id})
        else:
            self._checks.close()
            waits = self._checks.lacks_verifier or self._accounts.work.verifiers_grade
            meanwhile = "groups wait" if waits else "rewards are believed, and checked afterwards"
            told = "no verifier is left" if not self._verifiers else "no verifier answers"
            logger.warning(told, extra={"verifier": verifier.node_id, "meanwhile": meanwhile})
        self._learners.wake()
