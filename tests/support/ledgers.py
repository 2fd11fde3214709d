"""Ledger files of runs made of decisions alone, and a process that dies while it writes one."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.work.balance import Transaction
from node.coordinator.work.decisions import step_history
from node.coordinator.work.decisions.step_history import Hello
from support.coordinator import LEARNER, Desk, make_accounts

_SCHEMA_2: Final = Path(__file__).parent / "older" / "ledger_schema_2.sql"
"""A ledger that commit 0919909d wrote, as text; its evaluations were added."""


class LedgerDesk(Desk):
    """A desk whose decisions are on disk before they are answered."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(make_accounts(ledger.balance()))
        self.ledger = ledger
        if self.accounts.learner is None:
            self.settle(step_history.learner_joins(self.accounts, LEARNER, now=self.now))

    def settle(self, decision: object) -> object:
        transaction: Transaction = decision.transaction  # type: ignore[attr-defined]
        if transaction != Transaction():
            self.ledger.record(transaction)
        answer = super().settle(decision)  # type: ignore[arg-type]
        self.transactions.clear()
        return answer

    def open_drain(self, hello: Hello) -> step_history.Outcome:
        """Do what ``LearnerStreams`` does when a learner opens its stream."""
        opened = step_history.drain_opens(self.accounts, hello, now=self.now)
        outcome: step_history.Outcome = self.settle(opened)  # type: ignore[assignment]
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


def make_older(path: Path, *, schema: int = 2) -> None:
    """Write a ledger as 0.3 did before facts (schema 2), or as release 0.2.0 did (schema 1).

    It has two steps of two groups, a group that waits, a lease, a prompt that s1 failed, s3 in quarantine,
    and evaluations: of version 0 with a score, of version 10 below our coverage, of version 20 without an
    answer, and of version 30 under way.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as database:
        database.executescript(_SCHEMA_2.read_text())
        if schema == 1:
            for column in ("checks", "differing", "stake", "proven_at_s"):
                database.execute(f"ALTER TABLE standings DROP COLUMN {column}")
            database.execute("ALTER TABLE steps DROP COLUMN restored_version")
            for column in ("text_digest", "text_summary"):
                database.execute(f"ALTER TABLE learner DROP COLUMN {column}")
        database.execute(f"PRAGMA user_version = {schema}")
        database.commit()


def make_older_database(url: str) -> None:
    """Make the same ledger of schema 2 in an empty database."""
    import psycopg

    text = re.sub(r"X'([0-9A-F]*)'", r"'\\x\1'::bytea", _SCHEMA_2.read_text())
    for theirs, ours in (
        ("BEGIN TRANSACTION;", ""),
        ("COMMIT;", ""),
        (" STRICT, WITHOUT ROWID", ""),
        (" STRICT", ""),
        ("INTEGER", "BIGINT"),
        ("REAL", "DOUBLE PRECISION"),
        ("BLOB", "BYTEA"),
    ):
        text = text.replace(theirs, ours)
    with psycopg.connect(url, autocommit=True) as database:
        database.execute(text.encode())
        database.execute("CREATE TABLE accepted_loss (first_slot BIGINT NOT NULL)")
        database.execute('CREATE TABLE leadership ("only" BIGINT PRIMARY KEY, epoch BIGINT, address TEXT)')
        database.execute("INSERT INTO leadership VALUES (1, 7, '')")
        database.execute("CREATE TABLE ledger_schema (version BIGINT NOT NULL)")
        database.execute("INSERT INTO ledger_schema VALUES (2)")


@contextmanager
def open_desk(path: Path) -> Iterator[LedgerDesk]:
    """Open a ledger, making it where there is none; its learner has joined."""
    ledger = Ledger.open(path, run_id="run")
    try:
        yield LedgerDesk(ledger)
    finally:
        ledger.close()
