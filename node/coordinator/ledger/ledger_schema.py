"""The tables of a ledger, the same in both engines.

slots       what became of each intended use of a prompt       steps      what each version was trained on
groups      bytes of the groups that wait, or are checked      versions   which were announced
facts       everything else that is durable, by kind and key: see ``node.values.fact``
"""

import enum
import functools
import logging
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import xxhash

from node.coordinator.ledger.fact_rows import Owner, row_of
from node.coordinator.ledger.older_schemas import GONE, OLDER, facts_of_older
from node.coordinator.work.slots.slot import HELD_OUT_FROM, SETTLED, SlotKind, SlotState
from node.coordinator.work.slots.slot_generations import Generation
from node.errors import StartupError

logger = logging.getLogger(__name__)

SCHEMA_VERSION: Final = 3

OPEN_STATES: Final = ", ".join(f"'{state}'" for state in SlotState if state not in SETTLED)
"""As in a query."""

PAGE_BYTES: Final = 16 << 10
WAL_PAGES: Final = 4096
"""With SQLite's own values, 4 KiB and 1000 pages, a group of 1 MiB costs twice the time."""

CACHED_PAGES: Final = (8 << 20) // PAGE_BYTES
UNSPILLED_PAGES: Final = (32 << 20) // PAGE_BYTES
"""Pages kept in memory between two transactions, and changed pages kept until a transaction ends: a batch
(``BATCH_BYTES``), twice. With SQLite's own 2 MB, pages of a larger transaction are written to the -wal before
it ends; for one that then changes again, the checksums of all after it are read and written again. For a
group of 1 MiB these were 64 reads and 64 writes."""

OF_TRAINING: Final = f"number < {HELD_OUT_FROM}"
"""Which slots are of training, by their key."""

FACTS_TABLE: Final = """CREATE TABLE facts (
    kind TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (kind, key)
) STRICT, WITHOUT ROWID"""

ADDED_IN_3: Final = (
    FACTS_TABLE,
    f"ALTER TABLE slots ADD COLUMN kind TEXT NOT NULL DEFAULT '{SlotKind.TRAIN}'",
    "ALTER TABLE slots ADD COLUMN answer TEXT",
)

SCHEMA: Final = f"""
CREATE TABLE slots (
    number INTEGER PRIMARY KEY, prompt_index INTEGER NOT NULL, state TEXT NOT NULL,
    attempts TEXT NOT NULL, granted INTEGER NOT NULL, winner INTEGER NOT NULL, kind TEXT NOT NULL, answer TEXT
) STRICT;
CREATE INDEX slots_by_state ON slots (state);
CREATE TABLE groups (
    slot INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, sampler_id TEXT NOT NULL,
    spooled_at_s REAL NOT NULL, digest BLOB NOT NULL, header BLOB NOT NULL, columns BLOB NOT NULL
) STRICT;
CREATE TABLE steps (
    version INTEGER PRIMARY KEY, group_ids TEXT NOT NULL, staleness_versions TEXT NOT NULL,
    restored_version INTEGER
) STRICT;
CREATE TABLE versions (number INTEGER PRIMARY KEY, root BLOB NOT NULL, at_s REAL NOT NULL) STRICT;
{FACTS_TABLE};
"""


@dataclass(frozen=True, slots=True)
class Table:
    columns: tuple[str, ...]
    key: tuple[str, ...]


@functools.cache
def tables() -> Mapping[str, Table]:
    """Return every table of a ledger by name, the same in both engines."""
    found = {}
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'"):
            columns = connection.execute(f"PRAGMA table_info({name})").fetchall()
            key = tuple(column for _, column, _, _, _, place in columns if place)
            found[name] = Table(tuple(column for _, column, *_ in columns), key)
    return found


def columns_of(table: str) -> str:
    """Return the names of a table's columns, as in a query."""
    return ", ".join(map(_quoted, tables()[table].columns))


def _quoted(column: str) -> str:
    return f'"{column}"'


class Put(enum.Enum):
    """The fate of a row whose key is there already."""

    REPLACE = enum.auto()
    KEEP = enum.auto()
    REFUSE = enum.auto()


@functools.cache
def insertion(table: str, how: Put = Put.REPLACE) -> str:
    """Return the statement that puts a row, with all columns in their order, into a table."""
    columns, key = tables()[table].columns, tables()[table].key
    marks = ", ".join("?" * len(columns))
    statement = f"INSERT INTO {table} ({columns_of(table)}) VALUES ({marks})"
    if how is Put.REFUSE:
        return statement
    if how is Put.KEEP:
        return f"{statement} ON CONFLICT DO NOTHING"
    replaced = (f"{column} = excluded.{column}" for column in map(_quoted, columns) if column not in key)
    return f"{statement} ON CONFLICT ({', '.join(map(_quoted, key))}) DO UPDATE SET {', '.join(replaced)}"


def prepare(connection: sqlite3.Connection, path: Path, *, run_id: str) -> None:
    """Create the tables of a new ledger, upgrade an older one, check that one is whole and the run's.

    Raises:
        StartupError: it is of another run or has another schema.
        MalformedFactError: a fact of it, or a row of an older one, cannot be read.
        sqlite3.Error: it is damaged, or locked by another program.
    """
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
    connection.execute("PRAGMA synchronous = FULL")
    # Debian's SQLite overwrites what is deleted with zeros: a group of 1 MiB in 3.3 ms of CPU in place of .4.
    connection.execute("PRAGMA secure_delete = OFF")
    connection.execute(f"PRAGMA cache_size = {CACHED_PAGES}")
    connection.execute(f"PRAGMA cache_spill = {UNSPILLED_PAGES}")
    version = upgrade(connection)
    if version not in (0, SCHEMA_VERSION):
        raise StartupError(
            f"the ledger {path} has schema {version}, this software knows {SCHEMA_VERSION}",
            fix="Start the version of heterorl-node that wrote it.",
        )
    if version == 0:
        connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION};")
        connection.execute(insertion("facts"), row_of(Owner(run_id)))
        connection.execute("COMMIT")
    problems = [row[0] for row in connection.execute("PRAGMA quick_check(1)")]
    if problems != ["ok"]:
        raise sqlite3.DatabaseError(problems[0])
    if (owner := owner_of(connection.execute)) != run_id:
        raise StartupError(
            f"the ledger {path} belongs to run {owner!r}, configured is {run_id!r}",
            fix="Give each run a state directory of its own.",
        )


def upgrade(connection: sqlite3.Connection) -> int:
    """Upgrade an older release's ledger in one transaction; return the schema that it has now."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in OLDER:
        return int(version)
    connection.execute("BEGIN IMMEDIATE")
    try:
        if version == 1:
            connection.execute("ALTER TABLE steps ADD COLUMN restored_version INTEGER")
        convert(connection.execute, ADDED_IN_3)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    note_upgrade()
    return SCHEMA_VERSION


def note_upgrade() -> None:
    """Log that a ledger of an older release has our schema now."""
    note = "finished evaluations stay; one under way has to begin again, with the next version"
    logger.info("ledger upgraded", extra={"schema": SCHEMA_VERSION, "note": note})


def convert(execute: Callable[..., Any], added: Iterable[str]) -> None:
    """Turn the tables of an older schema into facts; the transaction is the caller's.

    Args:
        execute: A statement and its values, on either engine's connection.
        added: ``ADDED_IN_3``, in that engine's types.
    """
    rows = [row_of(fact) for fact in facts_of_older(execute)]
    for statement in added:
        execute(statement)
    for row in rows:
        execute(insertion("facts"), row)
    for table in GONE:
        execute(f"DROP TABLE IF EXISTS {table}")


def owner_of(execute: Callable[..., Any]) -> str:
    """Return the run that a ledger belongs to; empty where it does not say."""
    row = execute("SELECT key, value FROM facts WHERE kind = ?", [Owner.kind]).fetchone()
    return "" if row is None else Owner.decoded(*row).run_id


def begin_generation(connection: sqlite3.Connection, generation: Generation) -> None:
    """Mark every open slot of a restored ledger as lost, and number new slots from a new generation.

    Held-out ones are given up, so that an evaluation under way ends with the answers that it has.
    """
    upgrade(connection)
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(
        f"UPDATE slots SET state = iif({OF_TRAINING}, ?, ?), winner = 0 WHERE state IN ({OPEN_STATES})",
        [SlotState.LOST, SlotState.ABANDONED],
    )
    connection.execute("DELETE FROM groups")
    (before,) = connection.execute("SELECT count(*) FROM facts WHERE kind = ?", [Generation.kind]).fetchone()
    connection.execute(insertion("facts"), row_of(replace(generation, number=before + 1)))
    connection.execute("COMMIT")


def digest_of(group: Iterable[bytes]) -> bytes:
    """Return the checksum of a group's parts in the spool."""
    digest = xxhash.xxh3_64()
    for part in group:
        digest.update(part)
    return digest.digest()
