"""Decisions on what verifiers find out about groups: rewards that differ, grades, late answers; pure.

checked        rewards agree: it is delivered. They differ: it is thrown out, and enough of them are proof
proven liar    leased nothing until an operator pardons it, and its groups are thrown out

where verifiers grade:
leased --submit--> ungraded --grades--> spooled, as if its sampler had graded it
'-- the grader fails on it: as if its sampler had given the lease back for that
"""

from dataclasses import dataclass, replace

from node.coordinator.work.accounts import Accounts
from node.coordinator.work.balance import Transaction
from node.coordinator.work.checks.check_queue import Held
from node.coordinator.work.decisions.decision import Decision
from node.coordinator.work.decisions.trust import revocation
from node.coordinator.work.slots.bad_prompts import Report
from node.coordinator.work.slots.slot import SlotKind, group_id, kind_of, slot_and_attempt
from node.values.groups.failure import Failure
from node.values.groups.reward_finding import RewardCheck, RewardFinding
from node.values.groups.rollout import EncodedGroup
from node.values.groups.verdict import GroupVerdict, Verdict


@dataclass(frozen=True, slots=True)
class GroupFinding:
    """A finding: the outcome of a verifier's check of a group."""

    held: Held
    finding: RewardFinding
    noise_ratio: float = 0.0
    """Share of an honest sampler's groups that its grader grades otherwise the second time."""
    graded: EncodedGroup | None = None
    """The group with the grades that were found; None: it was checked, or is not there any more."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The consequences of a finding."""

    found: GroupFinding
    thrown_out: tuple[GroupVerdict, ...] = ()
    """Groups that are not trained on, because of it."""
    proof: str = ""
    """Why the sampler is a proven liar, since just now; empty: it is none."""


def found(accounts: Accounts, request: GroupFinding, *, now: float) -> Decision[Checked]:
    """Decide what becomes of a group that a verifier was sent, and of its sampler."""
    finding = request.finding
    if finding.grades is not None:
        return (
            Decision(Checked(request))
            if request.graded is None
            else _graded(accounts, request, request.graded)
        )
    if finding.fault is not None and accounts.work.verifiers_grade:
        return _ungradable(accounts, request, finding.fault, now=now)
    return _checked(accounts, request, now=now)


def _graded(accounts: Accounts, request: GroupFinding, group: EncodedGroup) -> Decision[Checked]:
    """Put a group with its grades in the place of the one without, unless nobody waits for it any more."""
    slot = accounts.slots.graded(*slot_and_attempt(group.group_id))
    if slot is None:
        return Decision(Checked(request))
    return Decision(Checked(request), Transaction(slots=(slot,), graded=group))


def _ungradable(
    accounts: Accounts, request: GroupFinding, fault: Failure, *, now: float
) -> Decision[Checked]:
    """Count an attempt at a prompt whose completions the grader cannot grade."""
    held, detail = request.held, request.finding.detail
    number, attempt = slot_and_attempt(held.group_id)
    slot, name = accounts.slots.ungradable(number, attempt, fault), held.sampler_id
    if slot is None:
        return Decision(Checked(request))
    report = Report(slot.prompt_index, (name,), fault, detail, number)
    facts = (
        *accounts.tallies.after([(name, Verdict.SUSPECT)]),
        *accounts.bad_prompts.after([report], prompts=accounts.slots.prompts, now=now),
        accounts.standings.of(name).after_faults(1, now=now),
    )
    checked = Checked(request, (GroupVerdict(held.group_id, Verdict.SUSPECT, detail),))
    return Decision(checked, Transaction(slots=(slot,), facts=facts))


def _checked(accounts: Accounts, request: GroupFinding, *, now: float) -> Decision[Checked]:
    """Decide on a group whose rewards were worked out again.

    A group with other rewards, or one that the grader cannot grade, is thrown out, unless it has been
    delivered unchecked: the learner may be training on it. An answer to a held-out prompt goes from its
    score. A proven liar loses its leases and all of its groups that are not yet trained on; the learner is
    told its name, and throws out what it holds of them.
    """
    held, finding = request.held, request.finding
    name, before = held.sampler_id, accounts.standings.of(held.sampler_id)
    # What was trained on unchecked was kept for this.
    is_settled = held.slot not in accounts.slots.open_slots
    freed = (held.slot,) if is_settled else ()
    if finding.outcome is RewardCheck.SKIPPED or before.is_proven_liar:
        return Decision(Checked(request), Transaction(freed=freed))
    if finding.outcome is RewardCheck.UNGRADABLE:
        after = before.after_refusal(now=now)
    else:
        differs = finding.outcome is RewardCheck.DISAGREED
        after = before.after_check(
            differs=differs, noise_ratio=request.noise_ratio, what=finding.detail, now=now
        )
    transaction = Transaction(facts=(after,), freed=freed)
    if finding.outcome is RewardCheck.AGREED:
        return Decision(Checked(request), transaction)
    if after.is_proven_liar:
        suspect = [slot for slot in accounts.slots.open.untrained_slots() if slot.winning_holder == name]
        undone = revocation(accounts, [name], now=now).transaction
        transaction = replace(undone, facts=(*undone.facts, after), freed=freed)
    elif is_settled and kind_of(held.slot) is SlotKind.HELD_OUT:
        change = accounts.evaluations.without((), group_ids=[held.group_id])
        retracted = replace(transaction, slots=change.slots, facts=(*transaction.facts, *change.evaluations))
        return Decision(Checked(request), retracted)
    else:
        slot = accounts.slots.open.unsent(held.slot)
        suspect = [slot] if slot is not None and group_id(slot.number, slot.winner) == held.group_id else []
    refused = [
        (group_id(slot.number, slot.winner), again)
        for slot in suspect
        if (again := accounts.slots.taken_back(slot.number, slot.winner)) is not None
    ]
    verdicts = tuple(GroupVerdict(lied, Verdict.SUSPECT, finding.detail) for lied, _ in refused)
    return Decision(
        Checked(request, verdicts, after.quarantine if after.is_proven_liar else ""),
        replace(
            transaction,
            slots=(*transaction.slots, *(again for _, again in refused)),
            facts=(*transaction.facts, *accounts.tallies.after([(name, Verdict.SUSPECT)] * len(refused))),
        ),
    )


def check_late(accounts: Accounts, request: Held, *, now: float) -> Decision[None]:
    """Hold it against a sampler that the check of its group is late, while others' groups are answered for.

    The group goes on waiting.
    """
    before = accounts.standings.of(request.sampler_id)
    if before.is_proven_liar:
        return Decision(None)
    return Decision(None, Transaction(facts=(before.after_refusal(now=now),)))
