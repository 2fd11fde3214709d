"""Decisions on whom the coordinator believes: revocations, pardons, quarantines; pure.

revoked        its leases are free at once, and whatever rests on its word alone goes with it
pardoned       by an operator: its word on prompts goes, and nothing is held against it any more
quarantined    by the learner, which measures it; leased a probe now and then until the learner releases it
proven liar    by a verifier; leased nothing until it is pardoned, and its groups are thrown out
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from node.coordinator.work.accounts import Accounts
from node.coordinator.work.balance import Transaction
from node.coordinator.work.check_queue import Held
from node.coordinator.work.decisions import Decision
from node.coordinator.work.group_check import NotedOptions
from node.coordinator.work.slots import SlotKind, group_id, kind_of
from node.rollout import RewardCheck, RewardFinding
from node.verdict import GroupVerdict, Verdict


@dataclass(frozen=True, slots=True)
class Undone:
    leases: int
    prompts: int
    """Prompts that its word kept from somebody."""


def revocation(accounts: Accounts, node_ids: Collection[str], *, now: float) -> Decision[Undone]:
    """Free what nodes hold that are shut out, and take back what they said; saying it again changes
    nothing."""
    freed = tuple(slot for node_id in sorted(node_ids) for slot in accounts.slots.freed(node_id))
    bad = accounts.bad_prompts.without(node_ids)
    taken_back = accounts.evaluations.without(node_ids)
    transaction = Transaction(slots=(*freed, *taken_back.slots), facts=(*bad, *taken_back.evaluations))
    return Decision(Undone(len(freed), len(bad)), transaction)


def pardon(accounts: Accounts, node_ids: Collection[str] | None) -> Decision[Undone]:
    """Ask every prompt again that these samplers failed, and hold nothing against them; None: all
    samplers."""
    bad = accounts.bad_prompts.without(node_ids)
    standings = tuple(
        pardoned
        for standing in accounts.standings
        if (node_ids is None or standing.sampler_id in node_ids)
        and (pardoned := standing.pardoned()) != standing
    )
    # What was done before a pardon is not found out after it.
    owed = accounts.reward_checks.owed_slots(node_ids) - accounts.slots.open_slots.keys()
    transaction = Transaction(facts=(*bad, *standings), freed=tuple(sorted(owed)))
    return Decision(Undone(0, len(bad)), transaction)


def quarantine(accounts: Accounts, sampler_id: str, reason: str, *, now: float) -> Decision[None]:
    standing = accounts.standings.of(sampler_id)
    if bool(reason) is bool(standing.quarantine) or standing.is_proven_liar:
        return Decision(None)
    changed = standing.in_quarantine(reason, now=now) if reason else standing.released()
    return Decision(None, Transaction(facts=(changed,)))


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check."""

    sampler_id: str
    thrown_out: tuple[GroupVerdict, ...] = ()
    """Groups that are not trained on, because of it."""
    proof: str = ""
    """Why the sampler is a proven liar, since just now; empty: it is none."""


def reward_checked(
    accounts: Accounts, held: Held, finding: RewardFinding, *, noise_ratio: float, now: float
) -> Decision[Checked]:
    """Decide what becomes of a group that was checked, and of its sampler.

    A group with other rewards, or one that the grader cannot grade, is thrown out, unless it has been
    delivered unchecked: the learner may be training on it. An answer to a held-out prompt goes from its
    score. A proven liar loses its leases and all of its groups that are not yet trained on; the learner is
    told its name, and throws out what it holds of them.
    """
    name, before = held.sampler_id, accounts.standings.of(held.sampler_id)
    # What was trained on unchecked was kept for this.
    is_settled = held.slot not in accounts.slots.open_slots
    freed = (held.slot,) if is_settled else ()
    if finding.outcome is RewardCheck.SKIPPED or before.is_proven_liar:
        return Decision(Checked(name), Transaction(freed=freed))
    if finding.outcome is RewardCheck.UNGRADABLE:
        after = before.after_refusal(now=now)
    else:
        differs = finding.outcome is RewardCheck.DISAGREED
        after = before.after_check(differs=differs, noise_ratio=noise_ratio, what=finding.detail, now=now)
    transaction = Transaction(facts=(after,), freed=freed)
    if finding.outcome is RewardCheck.AGREED:
        return Decision(Checked(name), transaction)
    if after.is_proven_liar:
        suspect = [slot for slot in accounts.slots.untrained() if slot.winning_holder == name]
        undone = revocation(accounts, [name], now=now).transaction
        transaction = replace(undone, facts=(*undone.facts, after), freed=freed)
    elif is_settled and kind_of(held.slot) is SlotKind.HELD_OUT:
        change = accounts.evaluations.without((), group_ids=[held.group_id])
        retracted = replace(transaction, slots=change.slots, facts=(*transaction.facts, *change.evaluations))
        return Decision(Checked(name), retracted)
    else:
        slot = accounts.slots.undelivered(held.slot)
        suspect = [slot] if slot is not None and group_id(slot.number, slot.winner) == held.group_id else []
    refused = [
        (group_id(slot.number, slot.winner), again)
        for slot in suspect
        if (again := accounts.slots.taken_back(slot.number, slot.winner)) is not None
    ]
    verdicts = tuple(GroupVerdict(lied, Verdict.SUSPECT, finding.detail) for lied, _ in refused)
    return Decision(
        Checked(name, verdicts, after.quarantine if after.is_proven_liar else ""),
        replace(
            transaction,
            slots=(*transaction.slots, *(again for _, again in refused)),
            facts=(*transaction.facts, *accounts.tallies.after([(name, Verdict.SUSPECT)] * len(refused))),
        ),
    )


def check_late(accounts: Accounts, held: Held, *, now: float) -> Decision[None]:
    """Hold it against a sampler that the check of its group is late, while others' groups are answered for.

    The group goes on waiting.
    """
    before = accounts.standings.of(held.sampler_id)
    if before.is_proven_liar:
        return Decision(None)
    return Decision(None, Transaction(facts=(before.after_refusal(now=now),)))


def task_is(accounts: Accounts, *, before: bytes) -> Decision[int]:
    """Note the digest of the task's name and options; the answer is how many groups are refused.

    What waits for training was graded by the options before: its slots are leased again. What the learner
    holds it refuses by itself, and what it has trained on by now it reports.
    """
    now_is = accounts.work.task_digest
    if now_is == before:
        return Decision(0)
    untrained = accounts.slots.untrained() if before else []
    reopened = [(slot, accounts.slots.taken_back(slot.number, slot.winner)) for slot in untrained]
    holders = [slot.winning_holder for slot in untrained]
    transaction = Transaction(
        slots=tuple(slot for _, slot in reopened if slot is not None),
        facts=(
            *accounts.tallies.after((holder, Verdict.FOREIGN) for holder in holders),
            *(accounts.bad_prompts.without(None) if before else ()),
            NotedOptions(now_is),
        ),
        freed=tuple(sorted(accounts.reward_checks.owed_slots() - accounts.slots.open_slots.keys())),
    )
    return Decision(len(transaction.slots), transaction)
