"""A decision: what a request comes to, and what must be on disk before anybody is told; pure.

    request --decision(accounts, request, now=...)--> answer, transaction
                                                        |
    decide 1 --> apply 1, decide 2 --> apply 2, decide 3 --> all on disk --> apply 3, answer 1 2 3
                                                        '--> the disk refused: nobody is answered, and where
                                                             something was applied, the accounts go back

All decisions have one signature. One that raises has changed nothing. Decisions that wait for each other
share a commit; the last one is applied once it is on disk, so a batch of one leaves nothing to take back.
"""

from dataclasses import dataclass, replace
from typing import Final, Generic, Protocol, TypeVar

from node.coordinator.work.accounts import Accounts
from node.coordinator.work.balance import Transaction
from node.coordinator.work.slots.slot import CONSUMED

Answer = TypeVar("Answer")
Answer_co = TypeVar("Answer_co", covariant=True)

NOTHING: Final = Transaction()


@dataclass(frozen=True, slots=True)
class Decision(Generic[Answer_co]):
    """An answer, and what must be on disk before it is given."""

    answer: Answer_co
    transaction: Transaction = NOTHING
    is_last: bool = False
    """Whether its caller has the answer before the next decision is taken."""


class Decide(Protocol[Answer_co]):
    """A decision with its request, as ``partial(decision, request=...)``, which changes nothing itself."""

    def __call__(self, accounts: Accounts, /, *, now: float) -> Decision[Answer_co]: ...


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

    def decide(self, decide: Decide[Answer], *, now: float) -> Decision[Answer]:
        """Take a decision, whose answer is given later.

        What ``decide`` raises is raised, and changes nothing.
        """
        self.apply()
        decision = decide(self._accounts, now=now)
        transaction = decision.transaction
        if transaction != NOTHING:
            consumed = [slot for slot in transaction.slots if slot.state in CONSUMED]
            kept = self._accounts.reward_checks.kept(consumed)
            self._decided.append((replace(transaction, kept=kept) if kept else transaction, now))
            stored = transaction.stored or transaction.graded
            self.size_bytes += 0 if stored is None else stored.size_bytes
        return decision

    def apply(self) -> None:
        """Apply what is not applied yet."""
        for transaction, now in self._decided[self._applied :]:
            self._accounts.apply(transaction, now=now)
        self._applied = len(self._decided)
