"""Groups to verifiers, findings back; what is drawn and what a finding proves is in ``work.reward_checks``.

Any number of verifiers share the groups that wait. What a stream that ends leaves goes to the next verifier
at once; when the last has ended, every group is delivered unchecked, or waits for the next verifier where one
is required.

Where verifiers grade, groups come by the same stream without rewards, and the findings are their grades.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from node.coordinator.data.rows import Rows
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.spool import Notify, Spool
from node.coordinator.transactions import Transactions
from node.coordinator.work import grading, trust
from node.coordinator.work.decisions import Decision
from node.coordinator.work.reward_checks import MOST_TRIES, Held
from node.coordinator.work.trust import Checked
from node.errors import Reason, RefusedError
from node.failure import Failure
from node.rollout import EncodedGroup, GroupGrades, RewardCheck, RewardFinding
from node.wire.rollouts import graded

logger = logging.getLogger(__name__)

MOST_GROUPS: Final = 256
"""Groups that a verifier takes at once."""

MOST_NOISE: Final = 0.1
"""Share of an honest sampler's groups that a grader may grade otherwise the second time. A noisier one proves
nothing within a run."""


@dataclass(eq=False, slots=True)
class Verifier:
    """One stream."""

    node_id: str
    groups: int
    """It takes at once."""
    noise_ratio: float
    sent: set[str] = field(default_factory=set)
    """Groups it has not answered for."""


class RewardChecking:
    """Used on the event loop's thread."""

    def __init__(
        self,
        transactions: Transactions,
        spool: Spool,
        *,
        rows: Rows | None,
        notify: Notify,
        metrics: CoordinatorMetrics,
    ) -> None:
        self._transactions = transactions
        self._accounts = transactions.accounts
        self._checks = transactions.accounts.reward_checks
        self._spool = spool
        self._rows = rows
        self._notify = notify
        self._metrics = metrics
        self._verifiers: set[Verifier] = set()
        self._unsettled: list[Held] = []
        """Groups to ask for again, because what was found could not be written or its stream has ended."""
        self._now_s = 0.0
        """As of the latest turn."""
        self._news = asyncio.Event()
        spool.has_spooled = self._news.set
        metrics.verifiers.set_function(lambda: len(self._verifiers))

    def admit(self, node_id: str, *, task_digest: bytes, groups: int, noise_ratio: float) -> Verifier:
        """Begin a verifier's stream.

        Raises:
            RefusedError: MALFORMED; BUSY, where it grades by other options than the run's.
        """
        if not 1 <= groups <= MOST_GROUPS or not 0 <= noise_ratio <= MOST_NOISE:
            raise RefusedError(
                Reason.MALFORMED,
                f"a verifier that takes {groups} groups and differs in {noise_ratio} of them; allowed are "
                f"1 to {MOST_GROUPS}, and 0 to {MOST_NOISE}",
            )
        if task_digest != self._accounts.work.task_digest:
            raise RefusedError(
                Reason.BUSY,
                f"the verifier grades by task options {task_digest.hex()}, the run's are "
                f"{self._accounts.work.task_digest.hex()}",
                fix="join again, and load the task as it is now",
            )
        verifier = Verifier(node_id, groups, noise_ratio)
        self._verifiers.add(verifier)
        self._checks.is_open = True
        self._spool.wake_drain()
        logger.info("verifier checks rewards", extra={"verifier": node_id, "noise_ratio": noise_ratio})
        return verifier

    def dismiss(self, verifier: Verifier) -> None:
        """End a stream; without a verifier nothing is held back, or everything where one is required."""
        self._verifiers.discard(verifier)
        self._checks.left(verifier.sent)
        self._news.set()
        if not self._verifiers:
            self._checks.close()
            self._spool.wake_drain()
            waits = self._checks.lacks_verifier or self._accounts.work.verifiers_grade
            meanwhile = "groups wait" if waits else "rewards are believed"
            logger.warning(
                "no verifier is left", extra={"verifier": verifier.node_id, "meanwhile": meanwhile}
            )

    async def groups(self, verifier: Verifier) -> AsyncIterator[tuple[EncodedGroup, bytes]]:
        """Yield the groups that a verifier is to check, each with its row."""
        while verifier in self._verifiers:
            is_busy = len(verifier.sent) >= verifier.groups
            if is_busy or (held := self._checks.next(but=verifier.sent)) is None:
                self._news.clear()
                await self._news.wait()
                continue
            slot = self._accounts.slots.open_slots.get(held.slot)
            group = None if slot is None else await self._transactions.read(slot)
            if slot is None or group is None or group.group_id != held.group_id:
                if (gone := self._checks.answered(held.group_id)) is not None:
                    self._checks.let_go(gone)
                continue
            verifier.sent.add(held.group_id)
            row = b"" if self._rows is None else await asyncio.to_thread(self._rows.row, slot.prompt_index)
            yield group, row

    async def note(self, verifier: Verifier, finding: RewardFinding) -> None:
        """Take in what a verifier found out about a group it was sent."""
        verifier.sent.discard(finding.group_id)
        self._checks.renew(verifier.sent, self._now_s)
        self._news.set()
        is_final = finding.outcome in (RewardCheck.GRADED, RewardCheck.UNGRADABLE)
        if not is_final and self._checks.put_off(finding.group_id, self._now_s):
            self._metrics.reward_checks.labels(finding.outcome).inc()
            about = {"group_id": finding.group_id, "verifier": verifier.node_id, "detail": finding.detail}
            logger.warning("group not graded; it is sent again", extra=about)
        elif (held := self._checks.answered(finding.group_id)) is not None:
            await self._settle(held, finding, noise_ratio=verifier.noise_ratio)

    async def _settle(self, held: Held, finding: RewardFinding, *, noise_ratio: float = 0.0) -> None:
        is_decided = False
        group: EncodedGroup | None = None
        gone = Checked(held.sampler_id)

        def decide(now: float) -> Decision[Checked]:
            nonlocal is_decided
            is_decided = True
            if finding.grades is not None:
                return Decision(gone) if group is None else grading.graded(self._accounts, group)
            if finding.fault is not None and self._accounts.work.verifiers_grade:
                return grading.failed(self._accounts, held, finding.fault, finding.detail, now=now)
            return trust.reward_checked(self._accounts, held, finding, noise_ratio=noise_ratio, now=now)

        tell = partial(self._tell, held, finding)
        try:
            if finding.grades is not None:
                group = await self._graded(held, finding.grades)
            # A stream that ends takes back no decision: what is on disk is told in any case.
            checked = await self._transactions.settle(decide, undo=tell)
        except RefusedError as refused:
            self._unsettled.append(held)
            logger.error("finding not written", extra={"group_id": held.group_id, "detail": str(refused)})
        except asyncio.CancelledError:
            if not is_decided:
                self._unsettled.append(held)
            raise
        else:
            tell(checked)

    async def _graded(self, held: Held, grades: GroupGrades) -> EncodedGroup | None:
        """Return a group with its grades; None where it is not there any more.

        Raises:
            RefusedError: these are not grades of this group, or the ledger cannot be read.
        """
        slot = self._accounts.slots.open_slots.get(held.slot)
        group = None if slot is None else await self._transactions.read(slot)
        if group is None or group.group_id != held.group_id:
            return None
        now, digest = self._now_s, self._accounts.grader.digest
        self._metrics.observe_lag("graded", now - group.spooled_at_s)
        return graded(group, grades, grader_digest=digest, at_s=now)

    def _tell(self, held: Held, finding: RewardFinding, checked: Checked) -> None:
        """Tell everybody whom a finding concerns, once what it means is on disk."""
        self._checks.let_go(held)
        self._spool.wake_drain(has_quarantines=bool(checked.proof))
        self._metrics.reward_checks.labels(finding.outcome).inc()
        about = {"sampler": held.sampler_id, "group_id": held.group_id, "detail": finding.detail}
        if finding.outcome not in (RewardCheck.AGREED, RewardCheck.GRADED):
            logger.warning("rewards not confirmed", extra={"outcome": finding.outcome, **about})
        for verdict in checked.thrown_out:
            self._metrics.groups.labels(verdict.verdict).inc()
            self._notify(held.sampler_id, verdict)
        if checked.proof:
            self._metrics.proven_liars.inc()
            self._metrics.thrown_out_groups.inc(len(checked.thrown_out))
            logger.error(
                "sampler lies about rewards; it is shut out, and what it made is sampled again",
                extra={
                    "sampler": held.sampler_id,
                    "reason": checked.proof,
                    "groups": len(checked.thrown_out),
                    "fix": "look at its machine; `heterorl-node pardon` lets it in again, `revoke` never",
                },
            )

    async def turn(self, now: float) -> None:
        """Ask again where findings were lost, deliver unchecked what has been held for too long, and give up
        what nobody can grade."""
        self._now_s = now
        for held in self._unsettled:
            self._checks.ask_again(held)
        self._unsettled.clear()
        if late := self._checks.late(now):
            self._metrics.reward_checks.labels("late").inc(late)
        for held in self._checks.hopeless():
            what = f"{MOST_TRIES} verifiers were sent it, and had gone or were silent before they answered"
            fault = Failure.GRADING_TIMED_OUT
            await self._settle(held, RewardFinding(held.group_id, RewardCheck.UNGRADABLE, what, fault))
        self._news.set()  # a run that leases nothing meanwhile brings no other news of what is sent again
        if self._accounts.slots.open.undelivered:  # a lease's end, too, may let newcomers' groups go
            self._spool.wake_drain()
        if passed_over := self._checks.passed_over:
            self._checks.passed_over = 0
            self._metrics.reward_checks.labels("passed over").inc(passed_over)
