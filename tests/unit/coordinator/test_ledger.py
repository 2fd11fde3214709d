"""The ledger on a real file and in a real database: what it gives back, and how the file fails."""

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from node.coordinator.ledger.ledger_check import examine
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.ledger.ledger_rows import LedgerEngine
from node.coordinator.ledger.ledger_schema import PAGE_BYTES
from node.coordinator.work.accounts import Transaction
from node.coordinator.work.bad_prompts import PromptChange
from node.coordinator.work.run_data import NO_DATA, DataSeen
from node.coordinator.work.slot_generations import Generation
from node.coordinator.work.slots import FIRST_RETRY_S, Attempt, Slot, SlotState
from node.coordinator.work.version_log import Announced
from node.errors import Reason, RefusedError, StartupError
from node.failure import BadPrompt, Failure
from node.rollout import EncodedGroup
from node.run import StepRecord
from node.verdict import Verdict
from support.coordinator import LEARNER, Desk, make_accounts
from support.ledgers import as_released
from support.refusals import refused

OpenLedger = Callable[[], AbstractContextManager[LedgerEngine]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "ledger.sqlite"


@pytest.fixture
def ledger(open_ledger: OpenLedger) -> Iterator[LedgerEngine]:
    with open_ledger() as ledger:
        yield ledger


def spool_one(ledger: LedgerEngine) -> EncodedGroup:
    desk = Desk()
    desk.lease()
    desk.submit("0.1")
    for transaction in desk.transactions:
        ledger.record(transaction)
    stored = desk.transactions[-1].stored
    assert stored is not None
    return stored


def startup_error(path: Path, run_id: str = "run") -> str:
    with pytest.raises(StartupError) as error:
        Ledger.open(path, run_id=run_id)
    return str(error.value)


def test_a_group_is_given_back_as_it_was_stored(ledger: LedgerEngine) -> None:
    stored = spool_one(ledger)
    assert ledger.group(0) == stored
    assert ledger.group(1) is None


def test_the_bytes_of_a_trained_group_are_gone(ledger: LedgerEngine) -> None:
    desk = Desk()
    desk.lease()
    desk.submit("0.1")
    desk.train(1, "0.1")
    for transaction in desk.transactions:
        ledger.record(transaction)
    assert ledger.group(0) is None
    assert ledger.balance().last_step == StepRecord(1, ("0.1",), (0,))


def test_everything_is_there_after_the_ledger_is_opened_again(open_ledger: OpenLedger) -> None:
    announced = (Announced(3, b"r" * 16, 5.0),)
    with open_ledger() as ledger:
        stored = spool_one(ledger)
        ledger.record(Transaction(learner=LEARNER, announced=announced, staleness=(("s1", 2), ("s1", 3))))
        before = ledger.balance()
    with open_ledger() as again:
        balance = again.balance()
        assert balance == before
        assert again.group(0) == stored
    assert balance.learner == LEARNER
    assert balance.announced == announced
    assert balance.staleness == (("s1", 5),)
    assert balance.verdicts == (("s1", Verdict.SPOOLED, 1),)
    assert balance.spooled_at_s == {0: stored.spooled_at_s}


def test_a_transaction_that_fails_leaves_nothing_behind(ledger: LedgerEngine) -> None:
    stored = spool_one(ledger)
    before = ledger.balance()
    again = Transaction(slots=before.slots.open_ones, verdicts=(("s1", Verdict.SPOOLED),), stored=stored)
    with pytest.raises((sqlite3.IntegrityError, psycopg.IntegrityError)):
        ledger.record(replace(again, announced=(Announced(1, b"", 0.0),)))
    assert ledger.balance() == before


def test_a_full_disk_is_a_refusal_that_changes_nothing(path: Path) -> None:
    with closing(Ledger.open(path, run_id="run")) as ledger:
        pages = ledger._connection.execute("PRAGMA page_count").fetchone()[0]
        ledger._connection.execute(f"PRAGMA max_page_count = {pages}")
        before = ledger.balance()
        big = EncodedGroup(b"", bytes(1 << 20), "0.1", "s1")
        with refused(Reason.DISK):
            ledger.record(Transaction(stored=big, verdicts=(("s1", Verdict.SPOOLED),)))
        assert ledger.balance() == before
        ledger._connection.execute("PRAGMA max_page_count = 1000000")
        ledger.record(Transaction(stored=big))
        assert ledger.group(0) == big


def test_a_flipped_bit_in_a_stored_group_is_found(path: Path) -> None:
    with closing(Ledger.open(path, run_id="run")) as ledger:
        spool_one(ledger)
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("UPDATE groups SET columns = CAST('G' || substr(columns, 2) AS BLOB)")
    with closing(Ledger.open(path, run_id="run")) as ledger, pytest.raises(RefusedError) as error:
        ledger.group(0)
    assert error.value.reason is Reason.DAMAGED


def test_a_second_coordinator_cannot_open_the_ledger(path: Path) -> None:
    with closing(Ledger.open(path, run_id="run")):
        assert f"in use by process {os.getpid()} on" in startup_error(path)


def test_a_ledger_of_another_run_is_refused(path: Path) -> None:
    Ledger.open(path, run_id="other").close()
    assert "belongs to run 'other'" in startup_error(path)


def test_a_ledger_of_an_unknown_schema_is_refused_by_every_tool(path: Path) -> None:
    Ledger.open(path, run_id="run").close()
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA user_version = 99")
    assert "has schema 99, this software knows 3" in startup_error(path)
    assert examine(path).problems == ("it has schema 99, this software knows 3",)


@pytest.mark.parametrize("damage", ["not a database", "a page"])
def test_a_damaged_ledger_says_what_to_do(path: Path, damage: str) -> None:
    with closing(Ledger.open(path, run_id="run")) as ledger:
        spool_one(ledger)
    content = bytearray(path.read_bytes())
    if damage == "a page":
        content[PAGE_BYTES : PAGE_BYTES * 3] = bytes(PAGE_BYTES * 2)
    else:
        content = bytearray(b"\x7fELF" * 2000)
    path.write_bytes(content)
    message = startup_error(path)
    assert "cannot be read" in message
    assert "backup" in message


def test_a_directory_in_the_ledgers_place_is_named(path: Path) -> None:
    path.mkdir(parents=True)
    assert str(path) in startup_error(path)


def test_a_half_made_ledger_is_made_whole(path: Path) -> None:
    """A process killed between making the file and its tables leaves an empty database."""
    path.parent.mkdir()
    path.touch()
    with closing(Ledger.open(path, run_id="run")) as ledger:
        assert ledger.balance().slots.open_ones == ()


def test_faults_and_bad_prompts_survive_a_restart(open_ledger: OpenLedger) -> None:
    desk = Desk()
    desk.lease("s1", 2)
    desk.fail("0.1", fault=Failure.PROMPT_TOO_LONG, detail="500 tokens")
    desk.fail("1.1", fault=Failure.GRADING_FAILED, detail="ValueError")
    desk.now += FIRST_RETRY_S
    desk.fail(desk.lease("s2")[0], "s2", fault=Failure.PROMPT_TOO_LONG, detail="500 tokens")
    with open_ledger() as ledger:
        for transaction in desk.transactions:
            ledger.record(transaction)
    with open_ledger() as again:
        accounts = make_accounts(again.balance())
    assert accounts.slots.open_slots[1].attempts == (Attempt(1, "s1", failure=Failure.GRADING_FAILED),)
    assert accounts.slots.counts()[SlotState.ABANDONED] == 1
    assert accounts.bad_prompts.newest(9) == desk.accounts.bad_prompts.newest(9)
    assert [bad.said_by for bad in accounts.bad_prompts.newest(9)] == [("s1", "s2"), ("s1",)]
    assert list(accounts.standings) == list(desk.accounts.standings)


def test_what_is_replaced_lifted_or_said_again_is_read_back_as_it_is_now(open_ledger: OpenLedger) -> None:
    open_one, closed = (Generation(1, 100, 7, 5.0, lost) for lost in (None, range(6, 9)))
    bad = (BadPrompt(3, Failure.EXPIRED, "", 1, 0, 5.0), BadPrompt(4, Failure.EXPIRED, "", 1, 1, 6.0))
    verdicts = (("s1", Verdict.ACCEPTED), ("s1", Verdict.ACCEPTED), ("s2", Verdict.STALE))
    with open_ledger() as ledger:
        for transaction in (
            Transaction(generation=open_one, prompts=PromptChange(bad), verdicts=verdicts, learner=LEARNER),
            Transaction(announced=(Announced(1, b"a" * 16, 1.0), Announced(2, b"b" * 16, 2.0))),
            Transaction(announced=(Announced(1, b"c" * 16, 3.0),), learner=replace(LEARNER, version=9)),
            Transaction(steps=(StepRecord(1, ("0.1",), (4,)), StepRecord(2, (), ()))),
        ):
            ledger.record(transaction)
        assert ledger.balance().slots.generations == (open_one,)
        ledger.record(
            Transaction(generation=closed, prompts=PromptChange(lifted=(3, 99)), verdicts=verdicts[:1])
        )
        ledger.record(Transaction(generation=Generation(2, 200, 150, 6.0)))
        balance = ledger.balance()
    assert balance.slots.generations == (closed, Generation(2, 200, 150, 6.0))
    assert [each.prompt_index for each in balance.bad_prompts] == [4]
    assert set(balance.verdicts) == {("s1", Verdict.ACCEPTED, 3), ("s2", Verdict.STALE, 1)}
    assert balance.learner == replace(LEARNER, version=9)
    assert balance.announced == (Announced(2, b"b" * 16, 2.0), Announced(1, b"a" * 16, 1.0))
    assert balance.last_step == StepRecord(2, (), ())
    assert (balance.slots.next_slot, balance.accepts_loss) == (200, False)


def test_lost_and_found_slots_are_told_from_the_others(open_ledger: OpenLedger) -> None:
    def slot(number: int, state: SlotState) -> Slot:
        return Slot(number, 0, state, (), granted=1)

    states = {4: SlotState.TRAINED, 5: SlotState.LOST, 6: SlotState.LEASED, 8: SlotState.TRAINED}
    with open_ledger() as ledger:
        ledger.record(Transaction(slots=tuple(slot(number, state) for number, state in states.items())))
        assert ledger.balance().slots.next_slot == 9
        ledger.record(Transaction(generation=Generation(1, 100, 7, 5.0)))
        balance = ledger.balance()
    assert (balance.slots.lost, balance.slots.found, balance.slots.next_slot) == ((5,), (8,), 100)
    assert [each.number for each in balance.slots.open_ones] == [6]
    assert balance.slots.settled == {SlotState.TRAINED: 2, SlotState.LOST: 1}


def test_the_data_of_a_run_survives_a_restart(open_ledger: OpenLedger) -> None:
    seen = DataSeen(b"d" * 16, 100, 10)
    learner = replace(LEARNER, chat_template_digest=b"c" * 16)
    with open_ledger() as ledger:
        assert ledger.balance().slots.data == NO_DATA
        ledger.record(Transaction(data=seen, learner=learner))
    with open_ledger() as again:
        assert (again.balance().slots.data, again.balance().learner) == (seen, learner)


def test_a_ledger_of_the_last_release_gets_what_it_lacks_and_keeps_the_rest(path: Path) -> None:
    with closing(Ledger.open(path, run_id="run")) as ledger:
        ledger.record(Transaction(learner=LEARNER))
    as_released(path)
    with closing(Ledger.open(path, run_id="run")) as ledger:
        [standing] = ledger.balance().standings
        assert ledger.balance().learner == LEARNER
    assert (standing.sampler_id, standing.allowance, standing.checks, standing.stake) == ("s", 4, 0, 0.0)
    assert examine(path).problems == ()
