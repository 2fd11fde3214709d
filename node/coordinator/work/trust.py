"""What the coordinator decides about whom it believes: revocations, pardons, quarantines; pure, as
``decisions``.

revoked        its leases are free at once, and whatever rests on its word alone goes with it
pardoned       by an operator: its word on prompts goes, and nothing is held against it any more
quarantined    by the learner, which measures it; leased a probe now and then until the learner releases it
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from node.coordinator.work.accounts import Accounts, Transaction
from node.coordinator.work.decisions import Decision
from node.coordinator.work.task_size import size_without


@dataclass(frozen=True, slots=True)
class Undone:
    """What was lifted with a sampler's word."""

    leases: int
    prompts: int
    """That its word kept from somebody."""


NOTHING_UNDONE: Final = Undone(0, 0)


def revocation(accounts: Accounts, node_ids: Collection[str], *, now: float) -> Decision[Undone]:
    """Free what nodes hold that are shut out, and take back what they said; saying it again changes
    nothing."""
    freed = tuple(slot for node_id in sorted(node_ids) for slot in accounts.slots.freed(node_id))
    bad = accounts.bad_prompts.without(node_ids)
    known = accounts.task if accounts.configured_prompts is None else None
    size, words = size_without(known, accounts.size_words, node_ids)
    transaction = Transaction(
        slots=freed,
        bad_prompts=bad.bad,
        lifted_prompts=bad.lifted,
        size_words=words,
        task=size,
        evaluation=accounts.evaluations.revoked(node_ids, now=now),
    )
    return Decision(Undone(len(freed), len(bad.bad) + len(bad.lifted)), transaction)


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
    transaction = Transaction(bad_prompts=bad.bad, lifted_prompts=bad.lifted, standings=standings)
    return Decision(Undone(0, len(bad.bad) + len(bad.lifted)), transaction)


def quarantine(accounts: Accounts, sampler_id: str, reason: str, *, now: float) -> Decision[None]:
    """Note that the learner quarantines a sampler, or, where ``reason`` is empty, releases it."""
    standing = accounts.standings.of(sampler_id)
    if bool(reason) is bool(standing.quarantine):
        return Decision(None)
    changed = standing.in_quarantine(reason, now=now) if reason else standing.released()
    return Decision(None, Transaction(standings=(changed,)))
