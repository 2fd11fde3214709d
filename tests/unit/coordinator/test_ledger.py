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
from node.coordinator.ledger.ledger_schema import PAGE_BYTES, SCHEMA_VERSION
from node.coordinator.work.balance import Transaction
from node.coordinator.work.samplers.sampler_standing import Standing
from node.coordinator.work.samplers.tallies import Tally
from node.coordinator.work.slots.slot import Attempt, Slot, SlotState
from node.coordinator.work.slots.slot_generations import Generation
from node.coordinator.work.terms.model_check import Learner
from node.coordinator.work.terms.run_data import NO_DATA, DataSeen
from node.coordinator.work.version_log import Announced
from node.errors import Reason, RefusedError, StartupError
from node.values.fact import Gone
from node.values.groups.failure import BadPrompt, Failure
from node.values.groups.rollout import EncodedGroup
from node.values.groups.verdict import Verdict
from node.values.run import StepRecord
from support.coordinator import LEARNER, NOW_S, Desk
from support.ledgers import make_older
from support.present import present
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
    stored = present(desk.transactions[-1].stored)
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
    data, attempt = DataSeen(b"d" * 16, 100, 10), Attempt(1, "s1", failure=Failure.GRADING_FAILED)
    failed = Slot(1, 7, SlotState.AVAILABLE, (attempt,), granted=1)
    with open_ledger() as ledger:
        assert ledger.balance().data == NO_DATA
        stored = spool_one(ledger)
        facts = (LEARNER, data, Tally("s2", staleness_versions=5))
        ledger.record(Transaction(slots=(failed,), announced=announced, facts=facts))
        before = ledger.balance()
    with open_ledger() as again:
        balance = again.balance()
        assert balance == before
        assert again.group(0) == stored
    assert (balance.announced, balance.data, balance.only(Learner)) == (announced, data, LEARNER)
    assert balance.of(Tally) == (Tally("s1", {Verdict.SPOOLED: 1}), Tally("s2", staleness_versions=5))
    assert balance.spooled_at_s == {0: stored.spooled_at_s}
    assert balance.slots.open_ones[1] == failed


def test_a_transaction_that_fails_leaves_nothing_behind(ledger: LedgerEngine) -> None:
    stored = spool_one(ledger)
    before = ledger.balance()
    again = Transaction(slots=before.slots.open_ones, facts=(LEARNER,), stored=stored)
    with pytest.raises((sqlite3.IntegrityError, psycopg.IntegrityError)):
        ledger.record(replace(again, announced=(Announced(1, b"", 0.0),)))
    assert ledger.balance() == before


def test_a_flipped_bit_in_a_stored_group_is_found(path: Path) -> None:
    with closing(Ledger.open(path, run_id="run")) as ledger:
        spool_one(ledger)
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("UPDATE groups SET columns = CAST('G' || substr(columns, 2) AS BLOB)")
    with closing(Ledger.open(path, run_id="run")) as ledger, refused(Reason.DAMAGED):
        ledger.group(0)


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


def test_what_is_replaced_ended_or_said_again_is_read_back_as_it_is_now(open_ledger: OpenLedger) -> None:
    open_one, closed = (Generation(1, 100, 7, 5.0, lost) for lost in (None, range(6, 9)))
    bad = (BadPrompt(3, Failure.EXPIRED, "", 1, 0, 5.0), BadPrompt(4, Failure.EXPIRED, "", 1, 1, 6.0))
    tally, last = (Tally("s1", {Verdict.ACCEPTED: n}) for n in (2, 3))
    gone = tuple(Gone(BadPrompt.kind, key) for key in ("3", "99"))
    with open_ledger() as ledger:
        for transaction in (
            Transaction(facts=(open_one, *bad, tally, LEARNER)),
            Transaction(announced=(Announced(1, b"a" * 16, 1.0), Announced(2, b"b" * 16, 2.0))),
            Transaction(announced=(Announced(1, b"c" * 16, 3.0),), facts=(replace(LEARNER, version=9),)),
            Transaction(steps=(StepRecord(1, ("0.1",), (4,)), StepRecord(2, (), ()))),
        ):
            ledger.record(transaction)
        assert ledger.balance().of(Generation) == (open_one,)
        ledger.record(Transaction(facts=(tally, *gone, closed, last)))
        ledger.record(Transaction(facts=(bad[0], Generation(2, 200, 150, 6.0), gone[0])))
        balance = ledger.balance()
    assert balance.of(Generation) == (closed, Generation(2, 200, 150, 6.0))
    assert balance.of(BadPrompt) == (bad[1],)
    assert balance.of(Tally) == (last,)
    assert balance.only(Learner) == replace(LEARNER, version=9)
    assert balance.announced == (Announced(2, b"b" * 16, 2.0), Announced(1, b"a" * 16, 1.0))
    assert balance.last_step == StepRecord(2, (), ())
    assert (balance.slots.next_slot, balance.accepts_loss) == (200, False)


def unknown_rows(path: Path) -> list[tuple[str, str, str]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute("SELECT kind, key, value FROM facts WHERE kind = 'weather'").fetchall()


def test_a_newer_releases_facts_are_counted_and_stay_untouched(path: Path) -> None:
    with closing(Ledger.open(path, run_id="run")) as ledger:
        ledger.record(Transaction(facts=(LEARNER,)))
    with closing(sqlite3.connect(path)) as database, database:
        rows = [("weather", key, "not even JSON") for key in ("", "s1")]
        database.executemany("INSERT INTO facts VALUES (?, ?, ?)", rows)
    with closing(Ledger.open(path, run_id="run")) as ledger:
        balance = ledger.balance()
        assert (balance.facts, balance.unknown_facts) == ((LEARNER,), {"weather": 2})
        ledger.record(Transaction(facts=(replace(LEARNER, version=9),)))
    assert examine(path).problems == ()
    assert unknown_rows(path) == rows


def test_a_fact_that_cannot_be_read_is_damage_that_is_named(path: Path) -> None:
    with closing(Ledger.open(path, run_id="run")) as ledger:
        ledger.record(Transaction(facts=(Tally("s1"), Tally("s2"))))
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE facts SET value = '{\"sampler_id\": 7}' WHERE key = 's1'")
    [problem] = examine(path).problems
    with closing(Ledger.open(path, run_id="run")) as ledger, pytest.raises(RefusedError) as error:
        ledger.balance()
    assert error.value.reason is Reason.DAMAGED
    assert all(named in error.value.what for named in (str(path), "'tally'", "'s1'", "sampler_id"))
    assert all(named in problem for named in ("'tally'", "'s1'", "sampler_id"))


def test_lost_and_found_slots_are_told_from_the_others(open_ledger: OpenLedger) -> None:
    def slot(number: int, state: SlotState) -> Slot:
        return Slot(number, 0, state, (), granted=1)

    states = {4: SlotState.TRAINED, 5: SlotState.LOST, 6: SlotState.LEASED, 8: SlotState.TRAINED}
    with open_ledger() as ledger:
        ledger.record(Transaction(slots=tuple(slot(number, state) for number, state in states.items())))
        assert ledger.balance().slots.next_slot == 9
        ledger.record(Transaction(facts=(Generation(1, 100, 7, 5.0),)))
        balance = ledger.balance()
    assert (balance.slots.lost, balance.slots.found, balance.slots.next_slot) == ((5,), (8,), 100)
    assert [each.number for each in balance.slots.open_ones] == [6]
    assert balance.slots.settled == {SlotState.TRAINED: 2, SlotState.LOST: 1}


@pytest.mark.parametrize("schema", [1, 2])
def test_an_older_ledger_is_read_as_it_is_and_upgraded_with_all_it_holds(path: Path, schema: int) -> None:
    make_older(path, schema=schema)
    as_it_was = examine(path)
    assert (as_it_was.schema, as_it_was.problems) == (schema, ())
    with closing(Ledger.open(path, run_id="run")) as ledger:
        balance = ledger.balance()
        assert ledger.group(5) is not None
    assert examine(path) == replace(as_it_was, schema=SCHEMA_VERSION)
    learner = present(balance.only(Learner))
    text = (b"x" * 16, "rule\tvalue\nother\tthing") if schema == 2 else (b"", "")
    assert (learner.version, learner.base_parts, learner.text_digest, learner.text_summary) == (
        2,
        b"p" * 16,
        *text,
    )
    assert balance.data == DataSeen(b"d" * 16, 100, 10, held_out_at=90)
    assert balance.task_digest == b"t" * 16
    assert balance.of(Generation) == (Generation(1, 0, 0, 5.0, range(0)),)
    assert balance.of(Tally) == (
        Tally("s1", {Verdict.SPOOLED: 4, Verdict.TRAINED: 4}),
        Tally("s2", {Verdict.SPOOLED: 1}),
    )
    assert balance.of(BadPrompt) == (
        BadPrompt(14, Failure.PROMPT_TOO_LONG, "9000 tokens", 1, 4, NOW_S, ("s1",)),
    )
    assert [(one.sampler_id, one.allowance, one.quarantine) for one in balance.of(Standing)] == [
        ("s1", 8, ""),
        ("s2", 6, ""),
        ("s3", 0, "its logprobs are off"),
    ]
    assert balance.last_step == StepRecord(2, ("2.1", "3.1"), (0, 0))
    assert [one.number for one in balance.announced] == [2, 1]


def test_an_older_ledger_with_a_row_of_no_release_is_named_and_stays_as_it_is(path: Path) -> None:
    make_older(path)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE bad_prompts SET reason = 'rain'")
    assert "'bad_prompts'" in startup_error(path)
    assert "'bad_prompts'" in examine(path).problems[0]
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE bad_prompts SET reason = 'expired'")
    Ledger.open(path, run_id="run").close()
