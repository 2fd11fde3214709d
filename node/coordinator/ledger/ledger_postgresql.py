"""The ledger in a PostgreSQL database that several coordinators of a run can reach: the leader writes it.

    BEGIN; the newest epoch is ours? --no--> refused, and this ledger is lost: another coordinator leads
           '--yes, and stays so until the end--> rows --COMMIT--> answered

The row of the epoch is shared by the leader's transactions and taken alone by a takeover: none that began
under an older epoch ends after it. A connection that breaks may have broken after the commit, so the ledger
is lost then, too: the next leader reads what became of it.

The tables are the file's, with PostgreSQL's types. Blocking, as ``ledger_file``.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import psycopg

from node.coordinator.ledger.fact_rows import Owner, row_of
from node.coordinator.ledger.ledger_rows import Cursor, LedgerRows, damaged
from node.coordinator.ledger.ledger_schema import (
    ADDED_IN_3,
    SCHEMA,
    SCHEMA_VERSION,
    convert,
    insertion,
    note_upgrade,
    owner_of,
)
from node.coordinator.ledger.older_schemas import OLDER
from node.coordinator.work.balance import Balance, Transaction
from node.coordinator.work.slots.slot_generations import Generation
from node.errors import DeposedError, Reason, RefusedError, StartupError
from node.values.fact import MalformedFactError
from node.values.groups.rollout import EncodedGroup
from node.values.operator_order import REVOKE, Order

_CONNECTION: Final[Mapping[str, Any]] = {
    # A database that vanished is noticed in 5 s, whether there is something to send or not.
    "connect_timeout": 5,
    "tcp_user_timeout": 5000,
    "keepalives_idle": 2,
    "keepalives_interval": 1,
    "keepalives_count": 3,
    "autocommit": True,
}

READ_ONLY: Final = "25006"
"""SQLSTATE of a write to a standby, or to a database that was made read-only."""

_TYPES: Final = (
    (" STRICT, WITHOUT ROWID", ""),
    (" STRICT", ""),
    ("INTEGER", "BIGINT"),
    ("REAL", "DOUBLE PRECISION"),
    ("BLOB", "BYTEA"),
    ("TEXT", 'TEXT COLLATE "C"'),
)


def _translated(statement: str) -> str:
    """Return a statement that makes tables with PostgreSQL's types."""
    return functools.reduce(lambda text, pair: text.replace(*pair), _TYPES, statement)


_TABLES: Final = f"""
{_translated(SCHEMA)}
ALTER TABLE groups ALTER COLUMN columns SET STORAGE EXTERNAL; -- compressed by samplers, if at all
CREATE TABLE accepted_loss (first_slot BIGINT NOT NULL);
CREATE TABLE leadership (
    "only" BIGINT PRIMARY KEY CHECK ("only" = 1), epoch BIGINT NOT NULL, address TEXT NOT NULL
);
CREATE TABLE ledger_schema (version BIGINT NOT NULL);
"""


def connect(url: str, *, name: str) -> "psycopg.Connection[Any]":
    """Connect to a database; ``name`` is what its administrator sees.

    Raises:
        StartupError: it cannot be reached, or does not let us in.
    """
    try:
        return psycopg.connect(url, application_name=name, **_CONNECTION)
    except psycopg.Error as error:
        raise StartupError(
            f"the ledger's database cannot be opened: {' '.join(str(error).split())}",
            fix="Check coordinator.ledger, the database, and the password in PGPASSWORD or a passfile.",
        ) from error


def prepare(connection: "psycopg.Connection[Any]", *, run_id: str) -> None:
    """Create the tables of a new ledger, upgrade the last release's, check that they are the run's. Only the
    leader may.

    Raises:
        StartupError: they are of another run or have another schema.
    """
    with connection.transaction():
        if connection.execute("SELECT to_regclass('ledger_schema')").fetchone() == (None,):
            connection.execute(_TABLES)
            connection.execute(marked(insertion("facts")), row_of(Owner(run_id)))
            connection.execute("INSERT INTO leadership VALUES (1, 0, '')")
            connection.execute("INSERT INTO ledger_schema VALUES (%s)", [SCHEMA_VERSION])
    _upgrade(connection)
    (version,) = connection.execute("SELECT version FROM ledger_schema").fetchone() or (None,)
    if version != SCHEMA_VERSION:
        raise StartupError(
            f"the ledger in the database has schema {version}, this software knows {SCHEMA_VERSION}",
            fix="Start the version of heterorl-node that wrote it.",
        )
    if (owner := owner_of(_executing(connection))) != run_id:
        raise StartupError(
            f"the ledger in the database belongs to run {owner!r}, configured is {run_id!r}",
            fix="Give each run a database of its own.",
        )


def _upgrade(connection: "psycopg.Connection[Any]") -> None:
    """Upgrade an older release's ledger in one transaction. Raises StartupError: a row cannot be read."""
    try:
        with connection.transaction():
            (version,) = connection.execute("SELECT version FROM ledger_schema").fetchone() or (None,)
            if version in OLDER:
                convert(_executing(connection), map(_translated, ADDED_IN_3))
                _adopt_revocations(connection)
                connection.execute("UPDATE ledger_schema SET version = %s", [SCHEMA_VERSION])
                note_upgrade()
    except MalformedFactError as error:
        refused = damaged("the ledger in the database", error)
        raise StartupError(refused.what, fix=refused.fix) from error


def _adopt_revocations(connection: "psycopg.Connection[Any]") -> None:
    """Make orders of the nodes that an older release's leader shut out, whose operator kept the reasons."""
    if connection.execute("SELECT to_regclass('revoked')").fetchone() == (None,):
        return
    for (node_id,) in connection.execute("SELECT node_id FROM revoked").fetchall():
        order = Order(REVOKE, node_id, by="the leader before", order_id="table revoked")
        connection.execute(marked(insertion("facts")), row_of(order))
    connection.execute("DROP TABLE revoked")


def _executing(connection: "psycopg.Connection[Any]") -> Callable[..., Any]:
    """Return a function that executes statements whose values are marked with ``?``."""
    return lambda statement, values=(): connection.execute(marked(statement), values)


def check_epoch(connection: "psycopg.Connection[Any]", epoch: int) -> None:
    """Keep the newest epoch as it is until the transaction ends. Raises DeposedError: it is another."""
    newest = connection.execute("SELECT epoch FROM leadership FOR SHARE").fetchone()
    if newest != (epoch,):
        raise DeposedError(f"another coordinator leads, with epoch {newest and newest[0]}; ours was {epoch}")


class FencedConnection:
    """A leader's connection: lost for good once it breaks, or another epoch is the newest."""

    def __init__(
        self, connection: "psycopg.Connection[Any]", *, epoch: int, on_lost: Callable[[DeposedError], None]
    ) -> None:
        """Use an open connection; ``on_lost`` is called in the thread that finds out, at most once."""
        if connection.execute("SHOW synchronous_commit").fetchone() == ("off",):
            connection.execute("SET synchronous_commit = on")  # nobody is told of what is not on disk
        self.connection = connection
        self._epoch = epoch
        self._on_lost = on_lost
        self._lost: DeposedError | None = None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Run the body as one transaction under the epoch. Raises RefusedError: as ``errors_told``."""
        with self.errors_told(), self.connection.transaction():
            check_epoch(self.connection, self._epoch)
            yield

    @contextmanager
    def errors_told(self) -> Iterator[None]:
        """Raise the database's errors as RefusedError: STANDBY, the connection is lost; DISK, any other."""
        if self._lost is not None:
            raise _not_leading(self._lost)
        try:
            yield
        except DeposedError as error:
            raise self._lose(error) from error
        except (psycopg.IntegrityError, psycopg.ProgrammingError, psycopg.DataError):
            raise  # our mistake, not the database's
        except psycopg.Error as error:
            what = " ".join(str(error).split())
            if self.connection.closed:
                raise self._lose(
                    DeposedError(f"the connection to the ledger's database broke: {what}")
                ) from error
            raise RefusedError(
                Reason.DISK,
                f"the ledger's database refused: {what}",
                fix=f"{fix_of(error)}; the same request may be sent again",
            ) from error

    def _lose(self, error: DeposedError) -> RefusedError:
        self._lost = error
        self._on_lost(error)
        return _not_leading(error)


class PostgresqlLedger(LedgerRows):
    """The leader's ledger, for as long as its epoch is the newest."""

    def __init__(self, fenced: FencedConnection) -> None:
        self._fenced = fenced
        self._connection = fenced.connection

    def close(self) -> None:
        self._connection.close()

    def balance(self) -> Balance:
        """See ``LedgerEngine``."""
        with self._fenced.errors_told(), self._connection.transaction():
            self._execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            try:
                return self._read_balance()
            except MalformedFactError as error:
                raise damaged("the ledger in the database", error) from error

    def record(self, *transactions: Transaction) -> None:
        """See ``LedgerEngine``."""
        with self._fenced.writing(), self._connection.pipeline():
            self._write_all(transactions)
            if any(transaction.of(Generation) for transaction in transactions):
                self._execute("DELETE FROM accepted_loss")

    def group(self, slot: int) -> EncodedGroup | None:
        """See ``LedgerEngine``."""
        with self._fenced.errors_told():
            return self._read_group(slot)

    def _execute(self, statement: str, values: Sequence[Any] = ()) -> Cursor:
        # Binary: as text, the bytes of a group would be twice as many.
        return self._connection.execute(marked(statement), values, binary=True)

    def _execute_each(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        self._connection.cursor().executemany(marked(statement), rows)

    def _is_loss_accepted(self, first_slot: int) -> bool:
        found = self._execute("SELECT 1 FROM accepted_loss WHERE first_slot = ?", [first_slot])
        return found.fetchone() is not None


@functools.cache
def marked(statement: str) -> str:
    """Return a statement with psycopg's marks for values."""
    return statement.replace("?", "%s")


def fix_of(error: psycopg.Error) -> str:
    """Return what to do about an error that is the database's own, by its SQLSTATE."""
    match error.sqlstate or "":
        case state if state == READ_ONLY:
            return (
                "point coordinator.ledger at the primary: this database is read-only, a standby or one with "
                "default_transaction_read_only"
            )
        case "" | "57P01" | "57P02" | "57P03":
            return "see whether the database runs, and whether this machine reaches it"
        case "53100":
            return "make room on the database's disk"
        case "53200" | "53300" | "53400":
            return "give the database more memory or connections"
        case state if state.startswith("58"):
            return "see the database's log: its disk or files fail"
        case _:
            return "see the database's log"


def _not_leading(error: DeposedError) -> RefusedError:
    """Return what peers are told by a coordinator that was deposed."""
    return RefusedError(
        Reason.STANDBY, f"this coordinator leads no longer: {error}", fix="connect to the one that does"
    )
