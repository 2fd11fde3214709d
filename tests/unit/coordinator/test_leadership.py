"""Two coordinators on one real database: one leads, and whoever does not can write nothing."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from node.coordinator.ledger import leadership
from node.coordinator.ledger.leadership import Leadership
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.ledger.ledger_postgresql import PostgresqlLedger
from node.coordinator.ledger.shared_records import SharedRecords
from node.coordinator.work.balance import Transaction
from node.coordinator.work.orders.orders import Orders
from node.coordinator.work.samplers.tallies import Tally
from node.enrolment.enrolment_ledger import EnrolmentLedger
from node.enrolment.tokens import Token
from node.errors import DeposedError, Reason, RefusedError
from node.values.groups.rollout import EncodedGroup
from node.values.groups.verdict import Verdict
from node.values.operator_order import Order
from node.values.roles import Role
from support.coordinator import LEARNER
from support.ledgers import make_older, make_older_database
from support.refusals import cannot_start, refused

pytestmark = pytest.mark.needs("postgresql")

WRITES = Transaction(facts=(Tally("s1", {Verdict.SPOOLED: 1}),))

END_WRITERS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE application_name LIKE 'heterorl-ledger-%' AND datname = current_database()"
)


def failing_on(table: str, condition: str = "disk_full") -> str:
    """Return statements that make inserts fail as a full disk does, or under another condition."""
    return (
        "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{condition}'; END $$; "
        f"CREATE TRIGGER fails BEFORE INSERT ON {table} EXECUTE FUNCTION fail()"
    )


@pytest.fixture
def one(database: str) -> Iterator[Leadership]:
    with closing(Leadership(database, run_id="run", address="one:7700")) as one:
        yield one


@pytest.fixture
def other(database: str) -> Iterator[Leadership]:
    with closing(Leadership(database, run_id="run", address="other:7700")) as other:
        yield other


def opened(leader: Leadership) -> tuple[PostgresqlLedger, list[DeposedError]]:
    lost: list[DeposedError] = []
    return leader.open_ledger(on_lost=lost.append), lost


def records_of(leader: Leadership, issued: Path) -> tuple[SharedRecords, list[DeposedError]]:
    lost: list[DeposedError] = []
    return leader.open_records(issued, on_lost=lost.append), lost


Led = tuple[PostgresqlLedger, list[DeposedError]]
Recorded = tuple[SharedRecords, list[DeposedError]]


@pytest.fixture
def led(one: Leadership) -> Iterator[Led]:
    """Return the ledger of one, which leads, and a list of what ends that."""
    assert one.try_to_lead()
    ledger, lost = opened(one)
    with closing(ledger):
        yield ledger, lost


@pytest.fixture
def recorded(one: Leadership, tmp_path: Path) -> Iterator[Recorded]:
    """Return the records of one, which leads, and a list of what ends that."""
    assert one.try_to_lead()
    records, lost = records_of(one, tmp_path / "one")
    with closing(records):
        yield records, lost


def refusal(ledger: PostgresqlLedger) -> RefusedError:
    with pytest.raises(RefusedError) as error:
        ledger.record(WRITES)
    return error.value


def soon(is_so: Callable[[], bool]) -> None:
    """Look again and again until ``is_so``: another thread or process of the server is to do something."""
    deadline_s = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def execute(database: str, statement: str) -> Any:
    with psycopg.connect(database, autocommit=True) as connection:
        return connection.execute(statement)


def test_one_leads_and_the_other_knows_who(one: Leadership, other: Leadership) -> None:
    assert other.leader() is None
    assert (one.try_to_lead(), other.try_to_lead()) == (True, False)
    assert other.leader() == leadership.Leader(1, "one:7700")


def test_who_leads_next_finds_all_that_was_written_under_a_higher_epoch(
    one: Leadership, led: Led, other: Leadership
) -> None:
    ledger, _ = led
    ledger.record(Transaction(facts=(LEARNER,)), WRITES)
    before = ledger.balance()
    one.close()
    soon(other.try_to_lead)
    assert (one.epoch, other.epoch) == (1, 2)
    with closing(opened(other)[0]) as ledger:
        assert ledger.balance() == before


def test_the_writer_of_an_older_epoch_is_refused_for_ever_and_leaves_nothing(led: Led, database: str) -> None:
    ledger, lost = led
    execute(database, "UPDATE leadership SET epoch = epoch + 1")
    assert refusal(ledger).reason is Reason.STANDBY
    execute(database, "UPDATE leadership SET epoch = epoch - 1")
    assert refusal(ledger).reason is Reason.STANDBY
    with refused(Reason.STANDBY):
        ledger.balance()
    assert "another coordinator leads, with epoch 2; ours was 1" in str(lost[0])
    assert execute(database, "SELECT * FROM facts WHERE kind != 'run'").fetchall() == []


def test_a_takeover_waits_for_no_transaction_of_the_leader_before_it(
    led: Led, one: Leadership, other: Leadership, database: str
) -> None:
    """As one that was stopped in the middle of a commit leaves it: the row of the epoch is taken."""
    ledger, lost = led
    named = "SELECT application_name FROM pg_stat_activity WHERE application_name LIKE 'heterorl-ledger-%'"
    (name,) = execute(database, named).fetchone()
    with closing(psycopg.connect(database, application_name=name)) as stopped:
        stopped.execute("SELECT epoch FROM leadership FOR SHARE")
        one.close()
        soon(other.try_to_lead)
        assert refusal(ledger).reason is Reason.STANDBY
        assert len(lost) == 1


def test_a_connection_that_breaks_ends_the_ledger_since_nobody_knows_what_became_of_the_commit(
    led: Led, database: str
) -> None:
    ledger, lost = led
    execute(database, END_WRITERS)
    assert refusal(ledger).reason is Reason.STANDBY
    with refused(Reason.STANDBY):
        ledger.group(0)
    assert len(lost) == 1


@pytest.mark.parametrize(
    ("condition", "named"),
    [("disk_full", ()), ("read_only_sql_transaction", ("read-only", "coordinator.ledger at the primary"))],
)
def test_what_the_database_refuses_is_a_refusal_that_changes_nothing(
    led: Led, database: str, condition: str, named: tuple[str, ...]
) -> None:
    ledger, lost = led
    execute(database, failing_on("groups", condition))
    big = EncodedGroup(b"", bytes(1 << 20), "0.1", "s1")
    with refused(Reason.DISK, *named):
        ledger.record(WRITES, Transaction(stored=big))
    assert ledger.balance().facts == ()
    execute(database, "DROP TRIGGER fails ON groups")
    ledger.record(WRITES, Transaction(stored=big))
    assert ledger.group(0) == big
    assert lost == []


def test_a_leader_that_says_nothing_for_long_loses_its_session(
    one: Leadership, other: Leadership, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was stopped: it asks no more, and holds the lock."""
    assert one.try_to_lead()
    assert not other.try_to_lead()
    monkeypatch.setattr(leadership, "SILENT_S", 0.0)
    assert not other.try_to_lead()  # it has ended the other's session
    soon(other.try_to_lead)
    monkeypatch.setattr(leadership, "ASK_S", 0.01)
    lost: list[DeposedError] = []
    with closing(one.open_ledger(on_lost=lost.append)):
        soon(lambda: bool(lost))
    assert "the session that holds the leadership ended" in str(lost[0])


def test_a_leader_that_goes_on_asking_is_left_alone(
    one: Leadership, other: Leadership, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leadership, "ASK_S", 0.01)
    monkeypatch.setattr(leadership, "SILENT_S", 2.0)
    assert one.try_to_lead()
    ledger, lost = opened(one)
    with closing(ledger):
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            assert not other.try_to_lead()
    assert not lost


def test_a_leader_whose_silence_another_user_of_the_database_may_not_see_is_a_startup_error(
    one: Leadership, database: str
) -> None:
    assert one.try_to_lead()
    execute(database, "CREATE ROLE another LOGIN")
    try:
        theirs = Leadership(database.replace("postgres@", "another@"), run_id="run", address="")
        with closing(theirs), cannot_start():
            theirs.try_to_lead()
    finally:
        execute(database, "DROP ROLE another")


def test_while_the_database_is_away_nobody_leads(other: Leadership, database: str) -> None:
    execute(database, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid != pg_backend_pid()")
    assert not other.try_to_lead()
    assert other.try_to_lead()


def test_a_database_of_another_run_and_one_that_is_not_there_are_startup_errors(
    one: Leadership, database: str
) -> None:
    assert one.try_to_lead()
    refused = cannot_start("'run'")
    with closing(Leadership(database, run_id="another", address="")) as another, refused:
        another.try_to_lead()
    with cannot_start("nowhere"):
        Leadership(database.replace("/test", "/nowhere"), run_id="run", address="")
    execute(database, "UPDATE ledger_schema SET version = 99")
    one.close()
    refused = cannot_start("99", "3")
    with closing(Leadership(database, run_id="run", address="")) as again, refused:
        soon(again.try_to_lead)


def test_an_older_database_is_upgraded_with_all_that_it_holds(
    one: Leadership, database: str, tmp_path: Path
) -> None:
    make_older_database(database)
    execute(database, "CREATE TABLE revoked (node_id TEXT PRIMARY KEY)")
    execute(database, "INSERT INTO revoked VALUES ('sampler-9')")
    make_older(tmp_path / "ledger.sqlite")
    assert one.try_to_lead()
    with (
        closing(opened(one)[0]) as ledger,
        closing(Ledger.open(tmp_path / "ledger.sqlite", run_id="run")) as file,
    ):
        upgraded = ledger.balance()
        assert list(Orders(upgraded.of(Order)).revoked) == ["sampler-9"]
        facts = tuple(fact for fact in upgraded.facts if not isinstance(fact, Order))
        assert replace(upgraded, facts=facts) == file.balance()
        assert ledger.group(5) == file.group(5)
        ledger.record(WRITES)


def test_a_fact_in_the_database_that_cannot_be_read_is_named(led: Led, database: str) -> None:
    ledger, _ = led
    ledger.record(WRITES)
    execute(database, "UPDATE facts SET value = '{}' WHERE kind = 'tally'")
    with pytest.raises(RefusedError) as error:
        ledger.balance()
    assert error.value.reason is Reason.DAMAGED
    assert "'tally' of 's1'" in error.value.what


TOKEN = Token(
    run_id="run",
    role=Role.SAMPLER,
    expires_at_s=2e9,
    nonce="0" * 32,
    address="hub:1",
    ca_certificate_pem="",
)


def spend(ledger: EnrolmentLedger, key: bytes, node_id: str = "sampler-1") -> None:
    ledger.spend(TOKEN, node_id=node_id, key_digest=key, now=1e9)


def test_a_token_that_was_spent_at_one_coordinator_is_spent_at_all(
    one: Leadership, other: Leadership, tmp_path: Path
) -> None:
    assert one.try_to_lead()
    before, lost = records_of(one, tmp_path / "one")
    spend(before, b"k")
    one.close()
    soon(other.try_to_lead)
    with closing(before), closing(records_of(other, tmp_path / "other")[0]) as after:
        spend(after, b"k")  # a retry after a lost answer
        with refused(Reason.TOKEN_REFUSED):
            spend(after, b"another")
        with refused(Reason.STANDBY):
            spend(before, b"k")
    assert len(lost) == 1


def test_a_broken_connection_of_the_records_alone_ends_the_leadership(
    recorded: Recorded, database: str
) -> None:
    records, lost = recorded
    execute(database, END_WRITERS)
    with refused(Reason.STANDBY):
        spend(records, b"k")
    assert "the connection to the ledger's database broke" in str(lost[0])


def test_a_database_that_cannot_write_records_refuses_them_and_goes_on_once_it_can(
    recorded: Recorded, database: str
) -> None:
    records, lost = recorded
    execute(database, failing_on("uses"))
    with refused(Reason.DISK):
        spend(records, b"k")
    execute(database, "DROP TRIGGER fails ON uses")
    spend(records, b"k")
    assert not lost


def test_records_that_meet_a_mistake_of_ours_are_left_without_a_transaction(
    recorded: Recorded, database: str
) -> None:
    records, lost = recorded
    execute(database, "ALTER TABLE leadership RENAME TO away")
    with pytest.raises(psycopg.ProgrammingError):
        spend(records, b"k")
    execute(database, "ALTER TABLE away RENAME TO leadership")
    spend(records, b"k")
    assert not lost


def test_a_token_that_was_cancelled_where_the_leader_is_lets_nobody_in(
    recorded: Recorded, tmp_path: Path
) -> None:
    records, _ = recorded
    # As `heterorl-node token` does, in a process of its own.
    with closing(EnrolmentLedger(tmp_path / "one")) as command:
        command.note_issued(TOKEN)
        spend(records, b"k")
        assert command.cancel(TOKEN.number)
    spend(records, b"k")  # a retry after a lost answer
    with refused(Reason.TOKEN_REFUSED):
        spend(records, b"another", "sampler-2")


def test_a_coordinator_that_starts_on_a_read_only_database_says_so_and_leads_once_it_is_not(
    one: Leadership, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = psycopg.conninfo.conninfo_to_dict(database)["dbname"]
    with psycopg.connect(database, autocommit=True) as operator:
        operator.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        with closing(Leadership(database, run_id="run", address="late:7700")) as late:
            assert not late.try_to_lead()
            [told] = [vars(record) for record in caplog.records if record.levelname == "WARNING"]
            assert told["message"] == "the ledger's database is read-only"
            assert "coordinator.ledger at the primary" in told["fix"]
            operator.execute("SET default_transaction_read_only = off")
            operator.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
            assert late.try_to_lead()
