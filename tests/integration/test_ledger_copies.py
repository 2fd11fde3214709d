"""Backup, verify and restore on real files and real processes; a ledger that lost its -wal."""

import json
import math
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from node.commands.cli import main
from node.coordinator.ledger.backup_record import BackupRecord
from node.coordinator.ledger.ledger_check import examine
from node.coordinator.ledger.ledger_copies import SLOTS_PER_SECOND, back_up, restore
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.ledger.ledger_schema import SCHEMA_VERSION
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.work.balance import Transaction
from node.coordinator.work.decisions.step_history import Hello
from node.coordinator.work.samplers.sampler_standing import Standing
from node.coordinator.work.slots.slot import (
    Attempt,
    HeldOutAnswer,
    Slot,
    SlotKind,
    SlotState,
    held_out_number,
)
from node.errors import StartupError
from node.values.evaluation import Evaluation
from support.coordinator import NOW_S
from support.ledgers import make_older, open_desk

ROOT = Path(__file__).parents[2]

WRITER = """
import sys, time
from pathlib import Path
from node.coordinator.work.decisions.step_history import Hello
from support.ledgers import open_desk
with open_desk(Path(sys.argv[1])) as desk:
    desk.open_drain(Hello("learner", 1, desk.accounts.last_step))
    for _ in range(int(sys.argv[2])):
        desk.train_next()
    desk.lease(held=desk.accounts.last_step)
    print("written", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "state" / "coordinator" / "ledger.sqlite"


def train(path: Path, steps: int) -> list[str]:
    with open_desk(path) as desk:
        desk.open_drain(Hello("learner", 1, desk.accounts.last_step))
        return [name for _ in range(steps) for name in desk.train_next()]


def wal_of(ledger: Path) -> Path:
    return ledger.with_name("ledger.sqlite-wal")


def train_and_be_killed(path: Path, steps: int) -> None:
    """Leave what is there when a process is killed that has trained: the file, and what its -wal has."""
    with open_desk(path) as desk:
        desk.open_drain(Hello("learner", 1, desk.accounts.last_step))
        for _ in range(steps):
            desk.train_next()
        left = {file: file.read_bytes() for file in (path, wal_of(path))}
    for file, content in left.items():
        file.write_bytes(content)


def test_a_backup_of_a_ledger_in_use_is_whole_and_of_one_moment(ledger: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copies" / "ledger.sqlite"
    is_done = threading.Event()
    seen = []

    def copy_for_ever() -> None:
        while not is_done.is_set():
            seen.append(back_up(ledger, to=copy))

    with open_desk(ledger) as desk:
        copying = threading.Thread(target=copy_for_ever)
        copying.start()
        try:
            while len(seen) < 3:
                desk.train_next()
        finally:
            is_done.set()
            copying.join(30)
    assert len(seen) >= 3
    assert all(findings.problems == () for findings in seen)
    assert all(findings.steps == findings.trained_groups == findings.last_step for findings in seen)
    assert [one.steps for one in seen] == sorted(one.steps for one in seen)
    assert examine(copy).steps == seen[-1].steps
    assert [path.name for path in copy.parent.iterdir()] == ["ledger.sqlite"]


def test_a_directory_whose_name_is_not_utf_8_gets_the_backup(tmp_path: Path) -> None:
    """As each name with an umlaut is in a Latin-1 locale: SQLite would write beside it, or nothing."""
    state = tmp_path / os.fsdecode(b"z\xfcrich")
    ledger = state / "coordinator" / "ledger.sqlite"
    train(ledger, 2)
    assert back_up(ledger, to=state / "copies" / "ledger.sqlite").steps == 2
    assert sorted(os.listdir(state)) == ["coordinator", "copies"]
    assert os.listdir(tmp_path) == [state.name]


def test_a_ledger_in_use_by_another_process_is_backed_up_by_the_command(
    ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, state_dir = tmp_path / "copy.sqlite", str(ledger.parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(ledger), "4"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}:{ROOT / 'tests'}"},
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        try:
            assert main(["ledger", "backup", "--state-dir", state_dir, "--to", str(copy)]) == 0
            assert "up to version 4" in capsys.readouterr().out
            assert main(["ledger", "check", str(copy), "--json"]) == 0
            found = json.loads(capsys.readouterr().out)
            assert (found["run_id"], found["steps"]) == ("run", 4)
            assert found["slots"] == {"leased": 1, "trained": 4}
            # The live one can be looked at as well, but nothing takes its place.
            assert main(["ledger", "check", str(ledger)]) == 0
            assert main(["ledger", "restore", str(copy), "--state-dir", state_dir]) == 3
            assert f"is in use by process {writer.pid} on" in capsys.readouterr().err
        finally:
            writer.kill()
    assert wal_of(ledger).stat().st_size > 0
    assert back_up(ledger, to=copy).steps == 4


def test_a_copy_that_cannot_be_finished_leaves_the_one_before(ledger: Path, tmp_path: Path) -> None:
    train(ledger, 1)
    copy = tmp_path / "copy.sqlite"
    back_up(ledger, to=copy)
    before = copy.read_bytes()
    with open_desk(ledger) as desk:
        desk.accounts.confirm()
        (name,) = desk.lease(held=1)
        desk.submit(name)
    with closing(sqlite3.connect(ledger)) as other, other:
        other.execute("UPDATE groups SET columns = CAST('bad' AS BLOB)")
    with pytest.raises(StartupError, match="is damaged: the group of slot 1 is not what was stored"):
        back_up(ledger, to=copy)
    assert copy.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.sqlite", "state"]


def shown(ledger: Path) -> tuple[float, float]:
    """Return age and failures of the copies, as the coordinator's metrics have them."""
    registry = CollectorRegistry()
    CoordinatorMetrics(registry).backups.record = partial(BackupRecord.load, ledger.with_name("backups.json"))
    names = ("backup_age_seconds", "backup_failures")
    age, failures = (registry.get_sample_value(f"heterorl_coordinator_{name}") for name in names)
    assert age is not None
    assert failures is not None
    return age, failures


def test_the_coordinator_shows_how_old_the_newest_copy_is_and_how_many_attempts_failed_since(
    ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(ledger, 1)
    state, copy = ledger.parents[1], tmp_path / "backups" / "ledger.sqlite"
    command = ["ledger", "backup", "--state-dir", str(state), "--to"]
    assert shown(ledger) == (math.inf, 0)
    (tmp_path / "file").touch()
    for failures in (1, 2):
        assert main([*command, str(tmp_path / "file" / "ledger.sqlite")]) == 3
        assert shown(ledger) == (math.inf, failures)
    assert main([*command, str(copy)]) == 0
    age_s, since = shown(ledger)
    assert 0 <= age_s < 100
    assert since == 0
    assert main([*command, str(tmp_path / "file" / "ledger.sqlite")]) == 3
    assert shown(ledger)[1] == 1
    assert shown(ledger)[0] < 100
    ledger.with_name("backups.json").write_text("half of it")
    assert shown(ledger) == (math.inf, 0)
    capsys.readouterr()


def test_without_a_file_for_a_ledger_there_is_nothing_to_show() -> None:
    registry = CollectorRegistry()
    CoordinatorMetrics(registry)
    assert registry.get_sample_value("heterorl_coordinator_backup_age_seconds") is None


def test_the_ledger_itself_is_no_place_for_its_backup(ledger: Path) -> None:
    train(ledger, 1)
    with pytest.raises(StartupError, match="is the ledger itself"):
        back_up(ledger, to=ledger)


ANSWER = HeldOutAnswer(0.5, 0, 4, {"words": 2.5})


def begin_evaluation(ledger: Path) -> Transaction:
    """Write one finished evaluation, and one under way with an answer."""
    done = Evaluation(0, 48, 2, 1, 0.0, 8, NOW_S, NOW_S + 9, counted_prompts=2, answers=2, reward_mean=0.5)
    submitted = (Attempt(1, "s1", is_submitted=True),)
    under_way = Transaction(
        slots=(
            Slot(held_out_number(10, 0), 48, SlotState.EVALUATED, submitted, 1, 1, ANSWER),
            Slot(held_out_number(10, 1), 49, SlotState.LEASED, (Attempt(1, "s2"),), 1),
        ),
        facts=(replace(done, version=10, finished_at_s=0.0, reward_mean=None),),
    )
    with closing(Ledger.open(ledger, run_id="run")) as opened:
        old = (
            Slot(held_out_number(0, n), 48 + n, SlotState.EVALUATED, submitted, 1, 1, ANSWER) for n in (0, 1)
        )
        opened.record(Transaction(slots=tuple(old), facts=(done,)))
        opened.record(under_way)
    return under_way


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("DELETE FROM steps WHERE version = 2", "no record of 1 of the versions 2 to 2"),
        ("UPDATE steps SET group_ids = '[\"0.1\"]' WHERE version = 2", "slot 0 was trained on 2 times"),
        ("UPDATE steps SET group_ids = '[\"1.2\"]' WHERE version = 2", "step 2 trained on group 1.2"),
        ("UPDATE steps SET group_ids = '[\"77.1\"]' WHERE version = 2", "whose slot is never leased"),
        ("DELETE FROM steps WHERE version = 3", "3 slots are trained, and steps name 2"),
        ("DELETE FROM slots WHERE number = 1", "2 of the slots 0 to 2"),
        (
            "INSERT INTO groups VALUES (0, 2, 's1', 0, x'00', x'00', x'00')",
            "a group of slot 0, which waits for none",
        ),
        ("UPDATE slots SET state = 'spooled' WHERE number = 2", "the group of slot 2 is not in the spool"),
        ("DELETE FROM facts WHERE kind = 'run'", "it names no run"),
        (
            f"DELETE FROM slots WHERE number = {held_out_number(0, 1)}",
            "the evaluation of version 0 counts 2 answers, and 1 are there",
        ),
        ("DROP TABLE steps", "it has no table steps"),
    ],
)
def test_what_is_wrong_with_a_ledger_is_named(
    ledger: Path, damage: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train(ledger, 3)
    begin_evaluation(ledger)
    assert examine(ledger).problems == ()
    with closing(sqlite3.connect(ledger)) as other, other:
        other.execute(damage)
    assert main(["ledger", "check", str(ledger)]) == 1
    assert problem in capsys.readouterr().out


def test_what_is_no_ledger_is_not_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"\x7fELF" * 2000)
    assert "cannot be read" in examine(tmp_path / "other").problems[0]
    assert main(["ledger", "check", str(tmp_path / "nowhere")]) == 3


def test_an_evaluation_under_way_survives_a_restore_and_ends_as_it_is_where_a_loss_is_accepted(
    ledger: Path, tmp_path: Path
) -> None:
    train(ledger, 1)
    under_way = begin_evaluation(ledger)
    back_up(ledger, to=tmp_path / "copy.sqlite")
    restore(tmp_path / "copy.sqlite", ledger=ledger, accepts_loss=False, now=NOW_S)
    with closing(Ledger.open(ledger, run_id="run")) as opened:
        balance = opened.balance()
    assert balance.of(Evaluation)[1:] == under_way.of(Evaluation)
    assert all(slot in balance.held_out for slot in under_way.slots)
    restore(tmp_path / "copy.sqlite", ledger=ledger, accepts_loss=True, now=NOW_S)
    with closing(Ledger.open(ledger, run_id="run")) as opened:
        balance = opened.balance()
    assert [one.version for one in balance.of(Evaluation)] == [0, 10]
    assert not any(slot.kind is SlotKind.HELD_OUT for slot in balance.slots.open_ones)
    assert balance.slots.lost == ()
    assert examine(ledger).problems == ()


def test_a_restored_ledger_is_the_copy_and_the_replaced_one_is_kept(ledger: Path, tmp_path: Path) -> None:
    train(ledger, 2)
    copy = tmp_path / "copy.sqlite"
    back_up(ledger, to=copy)
    train_and_be_killed(ledger, 3)  # as a crash leaves it, with a -wal file
    done = restore(copy, ledger=ledger, accepts_loss=False, now=NOW_S)
    assert done.first_slot is None
    assert done.aside is not None
    assert (examine(ledger).last_step, examine(done.aside).last_step) == (2, 5)
    assert not wal_of(ledger).exists()
    # The gap rule decides when the learner comes.
    with open_desk(ledger) as desk:
        assert desk.open_drain(Hello("learner", 1, 5)).gap


def test_a_damaged_ledger_is_kept_with_its_wal_which_never_meets_the_restored_one(
    ledger: Path, tmp_path: Path
) -> None:
    train(ledger, 2)
    copy = tmp_path / "copy.sqlite"
    back_up(ledger, to=copy)
    train_and_be_killed(ledger, 3)
    ledger.write_bytes(b"\x7fELF" * 2000)
    done = restore(copy, ledger=ledger, accepts_loss=True, now=NOW_S)
    assert done.aside is not None
    assert done.aside.with_name(f"{done.aside.name}-wal").exists()
    assert not wal_of(ledger).exists()
    assert (examine(ledger).problems, done.first_slot) == ((), int(NOW_S) * SLOTS_PER_SECOND)


def test_a_copy_of_another_run_or_a_damaged_one_changes_nothing(ledger: Path, tmp_path: Path) -> None:
    train(ledger, 2)
    other = tmp_path / "other.sqlite"
    Ledger.open(other, run_id="other").close()
    with pytest.raises(StartupError, match="is of run 'other'"):
        restore(other, ledger=ledger, accepts_loss=True, now=NOW_S)
    with closing(sqlite3.connect(ledger)) as newer:
        newer.execute("PRAGMA user_version = 99")
    with pytest.raises(StartupError, match="is of run 'other'"):
        restore(other, ledger=ledger, accepts_loss=False, now=NOW_S)
    with closing(sqlite3.connect(ledger)) as newer:
        newer.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    other.write_bytes(ledger.read_bytes()[:8192])
    with pytest.raises(StartupError, match=r"damaged|could not be restored"):
        restore(other, ledger=ledger, accepts_loss=True, now=NOW_S)
    assert examine(ledger).last_step == 2
    left = {path.name for path in ledger.parent.iterdir()} - {"ledger.sqlite-wal", "ledger.sqlite-shm"}
    assert left == {"ledger.sqlite", "ledger.sqlite.lock"}


def test_an_accepted_loss_is_claimed_once_even_where_the_ledger_that_says_so_is_put_back(
    ledger: Path, tmp_path: Path
) -> None:
    """As by a lost -wal: the file is again as `restore --accept-loss` left it."""
    train(ledger, 2)
    command = ["ledger", "restore", str(ledger), "--state-dir", str(ledger.parents[1]), "--accept-loss"]
    assert main(command) == 0
    shutil.copy(ledger, tmp_path / "as-restored.sqlite")
    assert len(train(ledger, 3)) == 3
    shutil.copy(tmp_path / "as-restored.sqlite", ledger)
    with open_desk(ledger) as desk:
        assert "versions 3 to 5" in desk.open_drain(Hello("learner", 1, 5)).gap
        assert desk.lease(held=5) == []


@pytest.mark.parametrize("schema", [1, 2])
def test_an_older_ledger_is_verified_copied_and_restored_as_it_is(
    ledger: Path, tmp_path: Path, schema: int
) -> None:
    copy = tmp_path / "copy.sqlite"
    make_older(ledger, schema=schema)
    back_up(ledger, to=copy)
    assert (examine(copy).problems, examine(copy).schema) == ((), schema)
    for accepts_loss in (False, True):
        done = restore(copy, ledger=ledger, accepts_loss=accepts_loss, now=NOW_S)
        assert (done.ledger.problems, done.ledger.last_step) == ((), 2)
    with closing(Ledger.open(ledger, run_id="run")) as upgraded:
        assert len(upgraded.balance().of(Standing)) == 3
