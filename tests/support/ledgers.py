"""Ledger files of runs made of decisions alone, and a process that dies while it writes one."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.work import step_history
from node.coordinator.work.accounts import Transaction
from node.coordinator.work.step_history import Hello
from support.coordinator import LEARNER, Desk, make_accounts


class LedgerDesk(Desk):
    """A desk whose decisions are on disk before they are answered."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(make_accounts(ledger.balance()))
        self.ledger = ledger
        if self.accounts.learner is None:
            self.settle(step_history.learner_joins(self.accounts, LEARNER))

    def settle(self, decision: object) -> object:
        transaction: Transaction = decision.transaction  # type: ignore[attr-defined]
        if transaction != Transaction():
            self.ledger.record(transaction)
        answer = super().settle(decision)  # type: ignore[arg-type]
        self.transactions.clear()
        return answer

    def open_drain(self, hello: Hello) -> step_history.Outcome:
        """Do what the spool does when a learner opens its stream."""
        outcome: step_history.Outcome = self.settle(step_history.drain_opens(self.accounts, hello))  # type: ignore[assignment]
        if outcome.gap:
            self.accounts.doubt(outcome.gap)
        elif outcome.refusal is None:
            self.accounts.confirm()
        return outcome

    def train_next(self, groups: int = 1) -> tuple[str, ...]:
        """Lease, submit and train on some groups; return their ids."""
        version = self.accounts.last_step
        names = self.lease(wanted=groups, held=version)
        assert len(names) == groups, names
        for name in names:
            self.submit(name)
        outcome = self.train(version + 1, *names)
        assert outcome.refusal is None, outcome.refusal
        return tuple(names)


def as_released(path: Path) -> None:
    """Make a ledger what release 0.2.0 wrote, with a sampler's standing in it."""
    with closing(sqlite3.connect(path)) as database:
        for column in ("checks", "differing", "stake", "proven_at_s"):
            database.execute(f"ALTER TABLE standings DROP COLUMN {column}")
        database.execute("ALTER TABLE steps DROP COLUMN restored_version")
        for column in ("text_digest", "text_summary"):
            database.execute(f"ALTER TABLE learner DROP COLUMN {column}")
        database.execute("INSERT INTO standings VALUES ('s', 4, 0, 0, 0, 0, 0, 0, 0, '', 0, 0)")
        database.execute("PRAGMA user_version = 1")
        database.commit()


@contextmanager
def open_desk(path: Path) -> Iterator[LedgerDesk]:
    """Open a ledger, making it where there is none; its learner has joined."""
    ledger = Ledger.open(path, run_id="run")
    try:
        yield LedgerDesk(ledger)
    finally:
        ledger.close()
