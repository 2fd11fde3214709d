"""Decisions on whom the coordinator believes: revocations, pardons, quarantines; pure.

revoked        its leases are free at once, and whatever rests on its word alone goes with it
pardoned       by an operator: its word on prompts goes, and nothing is held against it any more
quarantined    by the learner, which measures it; leased a probe now and then until the learner releases it

What verifiers prove is in ``findings``.
"""

from collections.abc import Collection
from dataclasses import dataclass

from node.coordinator.work.accounts import Accounts
from node.coordinator.work.balance import Transaction
from node.coordinator.work.decisions.decision import Decision


@dataclass(frozen=True, slots=True)
class Undone:
    leases: int
    prompts: int
    """Prompts that its word kept from somebody."""


def revocation(accounts: Accounts, request: Collection[str], *, now: float) -> Decision[Undone]:
    """Free what nodes hold that are shut out, and take back what they said; saying it again changes
    nothing."""
    node_ids = request
    freed = tuple(slot for node_id in sorted(node_ids) for slot in accounts.slots.freed(node_id))
    bad = accounts.bad_prompts.without(node_ids)
    taken_back = accounts.evaluations.without(node_ids)
    transaction = Transaction(slots=(*freed, *taken_back.slots), facts=(*bad, *taken_back.evaluations))
    return Decision(Undone(len(freed), len(bad)), transaction)


def pardon(accounts: Accounts, request: Collection[str] | None, *, now: float) -> Decision[Undone]:
    """Ask every prompt again that these samplers failed, and hold nothing against them; None: all
    samplers."""
    node_ids = request
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


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The learner's word on a sampler."""

    sampler_id: str
    reason: str
    """Empty: it is released."""


def quarantine(accounts: Accounts, request: Quarantine, *, now: float) -> Decision[Quarantine]:
    """Quarantine a sampler, or release it; the answer is the request."""
    standing = accounts.standings.of(request.sampler_id)
    if bool(request.reason) is bool(standing.quarantine) or standing.is_proven_liar:
        return Decision(request)
    changed = standing.in_quarantine(request.reason, now=now) if request.reason else standing.released()
    return Decision(request, Transaction(facts=(changed,)))
