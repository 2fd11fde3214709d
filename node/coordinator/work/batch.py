"""Decisions that share one commit, each taken with those before it applied; pure.

    decide 1 --> apply 1, decide 2 --> apply 2, decide 3 --> all on disk --> apply 3, answer 1 2 3
                                                       '---> the disk refused: nobody is answered, and where
                                                             something was applied, the accounts go back

The last one is applied once it is on disk, so a batch of one leaves nothing to take back.
"""

from collections.abc import Callable
from dataclasses import replace

from node.coordinator.work.accounts import Accounts
from node.coordinator.work.balance import Transaction
from node.coordinator.work.decisions import NOTHING, Answer, Decision
from node.coordinator.work.slots import CONSUMED


class Batch:
    """Decisions in their order; nobody may be told of one before all are on disk."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._decided: list[tuple[Transaction, float]] = []
        self._applied = 0
        self.size_bytes = 0
        """Size of the groups to be stored."""

    @property
    def transactions(self) -> tuple[Transaction, ...]:
        """Transactions that have to be on disk, in their order."""
        return tuple(transaction for transaction, _ in self._decided)

    @property
    def is_applied_in_part(self) -> bool:
        """Whether the accounts have something of it."""
        return self._applied > 0

    def decide(self, decide: Callable[[float], Decision[Answer]], *, now: float) -> Answer:
        """Take a decision and return its answer, to be given later.

        What ``decide`` raises is raised, and changes nothing.
        """
        self.apply()
        decision = decide(now)
        transaction = decision.transaction
        if transaction != NOTHING:
            consumed = [slot for slot in transaction.slots if slot.state in CONSUMED]
            kept = self._accounts.reward_checks.kept(consumed)
            self._decided.append((replace(transaction, kept=kept) if kept else transaction, now))
            stored = decision.transaction.stored or decision.transaction.graded
            self.size_bytes += 0 if stored is None else stored.size_bytes
        return decision.answer

    def apply(self) -> None:
        """Apply what is not applied yet."""
        for transaction, now in self._decided[self._applied :]:
            self._accounts.apply(transaction, now=now)
        self._applied = len(self._decided)
