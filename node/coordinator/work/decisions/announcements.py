"""Decisions that no peer asks for: versions are announced, evaluations end, task options change; pure."""

from node.coordinator.work.accounts import Accounts
from node.coordinator.work.balance import Transaction
from node.coordinator.work.decisions.decision import Decision
from node.coordinator.work.terms.group_check import NotedOptions
from node.coordinator.work.version_log import Announced
from node.values.groups.verdict import Verdict
from node.values.policy import PolicyVersion


def announced(accounts: Accounts, request: tuple[PolicyVersion, ...], *, now: float) -> Decision[None]:
    """Log versions that the store offers; those known already are passed over."""
    fresh = (version for version in request if version.number not in accounts.versions)
    log = tuple(Announced(version.number, version.root, now) for version in fresh)
    return Decision(None, Transaction(announced=log))


def evaluation_turn(accounts: Accounts, *, now: float) -> Decision[None]:
    """Count the answers to held-out prompts that no check holds back; end an evaluation that is over."""
    change = accounts.evaluations.turn(
        first_prompt=accounts.first_held_out, is_held=accounts.reward_checks.is_held, now=now
    )
    return Decision(None, Transaction(slots=change.slots, facts=change.evaluations))


def task_is(accounts: Accounts, request: bytes, *, now: float) -> Decision[int]:
    """Note the digest of the task's name and options; the answer is how many groups are refused.

    What waits for training was graded by the options before: its slots are leased again. What the learner
    holds it refuses by itself, and what it has trained on by now it reports.

    Args:
        request: The digest that the ledger noted before; empty: none.
    """
    before, now_is = request, accounts.work.task_digest
    if now_is == before:
        return Decision(0)
    untrained = accounts.slots.open.untrained_slots() if before else []
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
