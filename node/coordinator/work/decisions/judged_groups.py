"""Decisions on groups that the learner has judged; pure."""

from dataclasses import dataclass, field
from typing import Final

from node.coordinator.work.accounts import Accounts
from node.coordinator.work.balance import Transaction
from node.coordinator.work.decisions.decision import Decision
from node.coordinator.work.slots.slot import SlotState, parse_group_id
from node.errors import Reason, RefusedError
from node.values.fact import Fact
from node.values.groups.verdict import GroupVerdict, Verdict

_FAULTY: Final = frozenset({Verdict.SUSPECT, Verdict.FOREIGN, Verdict.MALFORMED})
"""Verdicts of the learner that are held against a sampler; one that is far away may be stale through no
fault."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The outcome of a verdict of the learner."""

    sampler_id: str
    spooled_at_s: float | None
    """Unix seconds; None where the group was judged before."""
    verdict: GroupVerdict | None = field(default=None, compare=False)


def judgement(accounts: Accounts, request: GroupVerdict, *, now: float) -> Decision[Judged | None]:
    """Decide what the learner's verdict on a group changes; None: nothing.

    DUPLICATE means that the learner has trained on the group before and the ledger does not know of it: the
    slot is lost, and neither delivered nor leased again. UNINFORMATIVE settles the slot without a step. Where
    that verdict is lost on its way, the group is delivered again and comes into another batch; that doubles
    no training, since the first batch changed nothing.

    Raises:
        RefusedError: MALFORMED; the verdict is not the learner's to give.
    """
    judged, parsed = request, parse_group_id(request.group_id)
    if parsed is None or judged.verdict in (Verdict.SPOOLED, Verdict.TRAINED):
        raise RefusedError(
            Reason.MALFORMED,
            f"the learner cannot give group {judged.group_id[:100]!r} the verdict {judged.verdict}",
        )
    before = accounts.slots.open_slots.get(parsed[0])
    slot = accounts.slots.judged(*parsed, judged.verdict)
    attempt = slot.attempt(parsed[1]) if slot is not None else None
    if before is None or slot is None or attempt is None:
        return Decision(None)
    is_first = before.state is SlotState.SPOOLED
    spooled_at_s = accounts.spooled.at_s.get(slot.number) if is_first else None
    answer = Judged(attempt.holder, spooled_at_s, judged)
    standing = accounts.standings.of(attempt.holder)
    is_held_against_it = judged.verdict in _FAULTY and not standing.quarantine
    facts: tuple[Fact, ...] = accounts.tallies.after([(attempt.holder, judged.verdict)])
    if is_held_against_it:
        facts = (*facts, standing.after_refusal(now=now))
    return Decision(answer, Transaction(slots=(slot,), facts=facts))
