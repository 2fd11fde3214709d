"""A ledger between a real database and a file: everything comes across, in both directions."""

import sqlite3
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from node.commands.cli import main
from node.coordinator.ledger.ledger_check import examine
from node.coordinator.ledger.ledger_exchange import back_up_database, restore_database
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.ledger.ledger_schema import tables
from node.coordinator.work.balance import Transaction
from node.coordinator.work.decisions.step_history import Hello
from node.coordinator.work.samplers.sampler_standing import Standing
from node.errors import StartupError
from support.databases import leading
from support.ledgers import LedgerDesk, make_older, open_desk

pytestmark = pytest.mark.needs("postgresql")


def rows(file: Path) -> dict[str, list[tuple[object, ...]]]:
    with closing(sqlite3.connect(file)) as connection:
        return {name: connection.execute(f"SELECT * FROM {name}").fetchall() for name in tables()}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A ledger with two steps, a group that waits, a lease, and something in most tables."""
    with open_desk(tmp_path / "ledger.sqlite") as desk:
        desk.open_drain(Hello("learner", 1, 0))
        desk.train_next(2)
        desk.train_next(2)
        (waiting, _) = desk.lease(wanted=2, held=2)
        desk.submit(waiting)
    return tmp_path / "ledger.sqlite"


def test_a_file_moved_into_a_database_is_the_same_ledger_and_comes_back_row_for_row(
    file: Path, tmp_path: Path, database: str
) -> None:
    with closing(Ledger.open(file, run_id="run")) as ledger:
        balance, group = ledger.balance(), ledger.group(4)
    assert group is not None
    done = restore_database(file, database, accepts_loss=False, now=2e9)
    assert (done.first_slot, done.ledger.problems) == (None, ())
    with leading(database) as ledger:
        assert ledger.balance() == balance
        assert ledger.group(4) == group
    copy = tmp_path / "backups" / "copy.sqlite"
    found = back_up_database(database, to=copy)
    assert (found.path, found.steps, found.groups, found.problems) == (str(copy), 2, 1, ())
    assert rows(copy) == rows(file)
    assert not list(copy.parent.glob("*-wal"))


def test_an_older_file_moves_into_a_database_and_stays_as_it_is(file: Path, database: str) -> None:
    make_older(file)
    before = file.read_bytes()
    restore_database(file, database, accepts_loss=False, now=2e9)
    assert file.read_bytes() == before
    with leading(database) as ledger:
        assert [one.sampler_id for one in ledger.balance().of(Standing)] == ["s1", "s2", "s3"]


def test_a_loss_that_is_accepted_numbers_slots_anew_and_is_claimed_once(
    file: Path, tmp_path: Path, database: str
) -> None:
    restore_database(file, database, accepts_loss=False, now=2e9)
    older = tmp_path / "older.sqlite"
    back_up_database(database, to=older)
    with leading(database) as ledger:
        desk = LedgerDesk(ledger)
        desk.open_drain(Hello("learner", 1, 2))
        desk.train_next(1)
    done = restore_database(older, database, accepts_loss=True, now=2e9)
    assert done.first_slot is not None
    assert done.aside is not None
    assert examine(done.aside).last_step == 3
    with leading(database) as ledger:
        assert ledger.balance().accepts_loss
        desk = LedgerDesk(ledger)
        lost = Hello("learner", 1, 3)
        assert desk.open_drain(lost).accepted_loss == range(3, 4)
        assert not ledger.balance().accepts_loss
        (name,) = desk.lease(held=3)
        assert int(name.partition(".")[0]) >= done.first_slot


def test_while_a_coordinator_leads_nothing_is_restored_but_copies_are_made(
    file: Path, tmp_path: Path, database: str
) -> None:
    with leading(database) as ledger:
        with pytest.raises(StartupError, match="a coordinator leads the run, at hub:7700"):
            restore_database(file, database, accepts_loss=False, now=2e9)
        assert back_up_database(database, to=tmp_path / "copy.sqlite").run_id == "run"
        ledger.record(Transaction())


def test_a_copy_of_another_run_and_a_database_without_a_ledger_are_refused(
    file: Path, tmp_path: Path, database: str
) -> None:
    with pytest.raises(StartupError, match="could not be copied"):
        back_up_database(database, to=tmp_path / "copy.sqlite")
    assert not (tmp_path / "copy.sqlite").exists()
    other = tmp_path / "other.sqlite"
    Ledger.open(other, run_id="other").close()
    restore_database(file, database, accepts_loss=False, now=2e9)
    with pytest.raises(StartupError, match="belongs to run 'run'"):
        restore_database(other, database, accepts_loss=False, now=2e9)
    with psycopg.connect(database) as connection:
        assert connection.execute("SELECT count(*) FROM steps").fetchone() == (2,)


def test_the_command_backs_up_and_restores_a_database_and_does_neither_without_being_told_where(
    file: Path, tmp_path: Path, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ledger", "restore", str(file), "--database", database]) == 0
    copy = str(tmp_path / "copy.sqlite")
    assert main(["ledger", "backup", "--database", database, "--to", copy]) == 0
    assert "steps     up to version 2" in capsys.readouterr().out
    assert main(["ledger", "check", copy]) == 0
    with pytest.raises(SystemExit):
        main(["ledger", "backup", "--to", copy])
    assert "--state-dir" in capsys.readouterr().err
    assert main(["ledger", "backup", "--database", "postgresql://127.0.0.1:1/none", "--to", copy]) == 3
    assert "the ledger's database cannot be opened" in capsys.readouterr().err
