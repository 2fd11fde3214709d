"""Ledger files of runs made of decisions alone, and a process that dies while it writes one."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.work import history
from node.coordinator.work.accounts import Transaction
from node.coordinator.work.history import Hello
from support.coordinator import LEARNER, Desk, make_accounts


def as_schema_3(path: Path) -> None:
    """Turn a closed ledger into one of the software before schema 4."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for column in ("base_root", "base_parts", "layout_summary", "context_tokens"):
            connection.execute(f"ALTER TABLE learner DROP COLUMN {column}")
        for table in ("standings", "size_words", "task_options"):
            connection.execute(f"DROP TABLE {table}")
        connection.execute("ALTER TABLE bad_prompts DROP COLUMN said_by")
        for column in ("held_out_at", "first_slot"):
            connection.execute(f"ALTER TABLE data DROP COLUMN {column}")
        for column in ("answers", "samplers", "left_out", "disputed_by"):
            connection.execute(f"ALTER TABLE evaluations DROP COLUMN {column}")
        for column in ("oldest_version", "newest_version"):
            connection.execute(f"ALTER TABLE evaluations ADD COLUMN {column} INTEGER NOT NULL DEFAULT 0")
        connection.execute("DROP TABLE evaluation_scores")
        connection.execute("CREATE TABLE evaluation_scores (slot INTEGER PRIMARY KEY) STRICT")
        connection.execute("PRAGMA user_version = 3")


def as_schema_2(path: Path) -> None:
    """Turn a closed ledger into one of the software before schema 3."""
    as_schema_3(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        for table in ("evaluations", "evaluation_slots", "evaluation_scores"):
            connection.execute(f"DROP TABLE {table}")
        connection.execute("DROP TABLE data")
        connection.execute("ALTER TABLE learner DROP COLUMN chat_template_digest")
        connection.execute("PRAGMA user_version = 2")


def as_schema_1(path: Path) -> None:
    """Turn a closed ledger into one of the software before schema 2, attempts included."""
    as_schema_2(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        rows = connection.execute("SELECT number, attempts FROM slots").fetchall()
        older = [(json.dumps([attempt[:3] for attempt in json.loads(held)]), number) for number, held in rows]
        connection.executemany("UPDATE slots SET attempts = ? WHERE number = ?", older)
        for table in ("generations", "task", "bad_prompts"):
            connection.execute(f"DROP TABLE {table}")
        connection.execute("PRAGMA user_version = 1")


class LedgerDesk(Desk):
    """A desk whose decisions are on disk before they are answered."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(make_accounts(ledger.balance()))
        self.ledger = ledger
        if self.accounts.learner is None:
            self.settle(history.learner_joins(self.accounts, LEARNER))

    def settle(self, decision: object) -> object:
        transaction: Transaction = decision.transaction  # type: ignore[attr-defined]
        if transaction != Transaction():
            self.ledger.record(transaction)
        answer = super().settle(decision)  # type: ignore[arg-type]
        self.transactions.clear()
        return answer

    def open_drain(self, hello: Hello) -> history.Outcome:
        """Do what the spool does when a learner opens its stream."""
        outcome: history.Outcome = self.settle(history.drain_opens(self.accounts, hello))  # type: ignore[assignment]
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


@contextmanager
def open_desk(path: Path) -> Iterator[LedgerDesk]:
    """Open a ledger, making it where there is none; its learner has joined."""
    ledger = Ledger.open(path, run_id="run")
    try:
        yield LedgerDesk(ledger)
    finally:
        ledger.close()
