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


_EVALUATIONS_OF_0_3 = """
DROP TABLE evaluations;
CREATE TABLE evaluations (
    version INTEGER PRIMARY KEY, first_prompt INTEGER NOT NULL, prompts INTEGER NOT NULL,
    completions INTEGER NOT NULL, temperature REAL NOT NULL, max_new_tokens INTEGER NOT NULL,
    started_at_s REAL NOT NULL, finished_at_s REAL NOT NULL,
    counted_prompts INTEGER NOT NULL, dropped_prompts INTEGER NOT NULL,
    reward_mean REAL NOT NULL, reward_standard_error REAL NOT NULL, cut_ratio REAL NOT NULL,
    tokens_mean REAL NOT NULL, sampling TEXT NOT NULL, metrics TEXT NOT NULL, answers INTEGER NOT NULL,
    samplers INTEGER NOT NULL, left_out TEXT NOT NULL, disputed_by TEXT NOT NULL
) STRICT;
CREATE TABLE evaluation_slots (
    number INTEGER PRIMARY KEY, prompt_index INTEGER NOT NULL, state TEXT NOT NULL,
    attempts TEXT NOT NULL, granted INTEGER NOT NULL, winner INTEGER NOT NULL
) STRICT;
CREATE TABLE evaluation_scores (
    version INTEGER NOT NULL, slot INTEGER NOT NULL, sampler_id TEXT NOT NULL, reward_mean REAL NOT NULL,
    cut_completions INTEGER NOT NULL, tokens INTEGER NOT NULL, metrics TEXT NOT NULL,
    PRIMARY KEY (version, slot)
) STRICT, WITHOUT ROWID;
INSERT INTO evaluations VALUES
    (0, 48, 10, 1, 0.0, 8, 1.0, 2.0, 9, 1, 0.5, 0.1, 0.25, 4.0, '', '{"words": 2.5}', 18, 2, '', ''),
    (10, 48, 10, 1, 0.0, 8, 3.0, 4.0, 8, 2, 0.9, 0.1, 0.25, 4.0, '', '', 8, 1, '', ''),
    (20, 48, 10, 1, 0.0, 8, 5.0, 6.0, 0, 10, 0.0, 0.0, 0.0, 0.0, '', '', 0, 0, '', ''),
    (30, 48, 10, 1, 0.0, 8, 7.0, 0.0, 1, 0, 0.0, 0.0, 0.0, 0.0, '', '', 1, 1, '', '');
INSERT INTO evaluation_slots VALUES (0, 48, 'evaluated', '[[1, "s1", true, null]]', 1, 1);
INSERT INTO evaluation_scores VALUES (0, 0, 's1', 0.5, 0, 4, ''), (30, 0, 's1', 0.5, 0, 4, '');
"""


def as_0_3(path: Path) -> None:
    """Make a ledger what release 0.3.0 wrote.

    It has evaluations: of version 0 with a score, of version 10 below our coverage, of version 20 without an
    answer, and of version 30 under way.
    """
    with closing(sqlite3.connect(path)) as database:
        for column in ("kind", "answer"):
            database.execute(f"ALTER TABLE slots DROP COLUMN {column}")
        database.executescript(f"BEGIN; {_EVALUATIONS_OF_0_3} PRAGMA user_version = 2; COMMIT;")


def as_released(path: Path) -> None:
    """Make a ledger what release 0.2.0 wrote, with a sampler's standing in it."""
    as_0_3(path)
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
