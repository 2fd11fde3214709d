"""Decisions on groups that verifiers grade; pure.

    leased --submit--> ungraded --grades--> spooled, as if its sampler had graded it
                          '-- the grader fails on it: as if its sampler had given the lease back for that

A group that is not what it says is thrown out as where samplers grade: see ``trust.reward_checked``.
"""

from node.coordinator.work.accounts import Accounts
from node.coordinator.work.bad_prompts import Report
from node.coordinator.work.balance import Transaction
from node.coordinator.work.check_queue import Held
from node.coordinator.work.decisions import Decision
from node.coordinator.work.slots import slot_and_attempt
from node.coordinator.work.trust import Checked
from node.failure import Failure
from node.rollout import EncodedGroup
from node.verdict import GroupVerdict, Verdict


def graded(accounts: Accounts, group: EncodedGroup) -> Decision[Checked]:
    """Put a group with its grades in the place of the one without, unless nobody waits for it any more."""
    slot = accounts.slots.graded(*slot_and_attempt(group.group_id))
    if slot is None:
        return Decision(Checked(group.sampler_id))
    return Decision(Checked(group.sampler_id), Transaction(slots=(slot,), graded=group))


def failed(accounts: Accounts, held: Held, fault: Failure, detail: str, *, now: float) -> Decision[Checked]:
    """Count an attempt at a prompt whose completions the grader cannot grade."""
    number, attempt = slot_and_attempt(held.group_id)
    slot, name = accounts.slots.ungradable(number, attempt, fault), held.sampler_id
    if slot is None:
        return Decision(Checked(name))
    report = Report(slot.prompt_index, (name,), fault, detail, number)
    facts = (
        *accounts.tallies.after([(name, Verdict.SUSPECT)]),
        *accounts.bad_prompts.after([report], prompts=accounts.slots.prompts, now=now),
        accounts.standings.of(name).after_faults(1, now=now),
    )
    checked = Checked(name, (GroupVerdict(held.group_id, Verdict.SUSPECT, detail),))
    return Decision(checked, Transaction(slots=(slot,), facts=facts))
