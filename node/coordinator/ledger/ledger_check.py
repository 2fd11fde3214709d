"""Checks whether a ledger file is whole, and reports what it holds; only reads it.

Beyond what SQLite checks: every step follows on the one before, or its loss was accepted; no slot was trained
on twice; the groups in the spool are the bytes that were stored.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

from node.coordinator.ledger.fact_rows import Owner, fact_of, row_of
from node.coordinator.ledger.ledger_schema import (
    FACTS_TABLE,
    OF_TRAINING,
    SCHEMA_VERSION,
    digest_of,
    insertion,
    tables,
)
from node.coordinator.ledger.older_schemas import OLDER, facts_of_older
from node.coordinator.work.slots.slot import SlotKind, held_out_number
from node.coordinator.work.slots.slot_generations import Generation, Generations
from node.coordinator.work.terms.run_data import NO_DATA, DataSeen
from node.errors import StartupError
from node.values.evaluation import Evaluation
from node.values.fact import MalformedFactError, OneFact

_SHOWN: Final = 5
"""Problems reported of each kind; the rest are alike."""

_CONTRADICTIONS: Final = (
    (
        "SELECT CAST(value AS INTEGER) AS slot, count(*) FROM steps, json_each(group_ids) "
        "GROUP BY slot HAVING count(*) > 1",
        "slot {} was trained on {} times",
    ),
    (
        "SELECT version, value, coalesce(state, 'never leased') FROM steps, json_each(group_ids) "
        "LEFT JOIN slots ON slots.number = CAST(value AS INTEGER) WHERE state IS NOT 'trained' "
        "OR winner != CAST(substr(value, instr(value, '.') + 1) AS INTEGER)",
        "step {} trained on group {}, whose slot is {}, or was won by another",
    ),
    (
        "SELECT number FROM slots LEFT JOIN groups ON slot = number "
        "WHERE state IN ('ungraded', 'spooled', 'accepted') AND attempt IS NOT winner",
        "the group of slot {} is not in the spool",
    ),
    (
        "SELECT slot FROM groups LEFT JOIN slots ON slot = number "
        "WHERE coalesce(state, '') NOT IN ('ungraded', 'spooled', 'accepted') AND NOT "
        # Kept to be checked.
        "(coalesce(state, '') IN ('trained', 'uninformative', 'evaluated') AND attempt = winner)",
        "the spool has a group of slot {}, which waits for none",
    ),
    (
        f"SELECT number FROM slots WHERE (kind = 'train') != ({OF_TRAINING})",
        "slot {} is of the other kind than its number says",
    ),
)
"""Queries that find rows which contradict each other, and what is said of them."""


@dataclass(frozen=True, slots=True)
class LedgerReport:
    path: str
    run_id: str = ""
    schema: int = 0
    steps: int = 0
    last_step: int = 0
    lost_steps: int = 0
    """Steps whose records were lost with older ledgers, as accepted."""
    generations: int = 0
    next_slot: int = 0
    slots: dict[str, int] = field(default_factory=dict)
    groups: int = 0
    trained_groups: int = 0
    newest_version: int = 0
    problems: tuple[str, ...] = ()


@contextmanager
def reading(path: Path, *, as_it_is: bool = False) -> Iterator[sqlite3.Connection]:
    """Open a ledger for reading, whether a coordinator runs or not.

    Args:
        as_it_is: Show the tables of an older one as they are, in place of what an upgrade makes of them.
    Raises:
        sqlite3.Error: it cannot be opened.
        FileNotFoundError: there is none.
    """
    if not path.is_file():
        raise FileNotFoundError(path)
    uri = path.resolve().as_uri()
    with closing(sqlite3.connect(f"{uri}?mode=ro", uri=True, isolation_level=None)) as connection:
        try:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            # In WAL mode SQLite writes beside the file. Where it may not, there is no other writer either.
            if path.with_name(f"{path.name}-wal").exists():
                raise
        else:
            yield connection if as_it_is else _as_ours(connection)
            return
    with closing(sqlite3.connect(f"{uri}?immutable=1", uri=True, isolation_level=None)) as connection:
        yield connection if as_it_is else _as_ours(connection)


def _as_ours(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Return a connection that reads an older ledger as if it had our tables; nothing is written."""
    if _number(connection, "PRAGMA user_version") in OLDER:
        try:
            rows = [row_of(fact) for fact in facts_of_older(connection.execute)]
        except MalformedFactError as error:
            raise sqlite3.DatabaseError(str(error)) from error
        connection.execute(FACTS_TABLE.replace("CREATE TABLE", "CREATE TEMP TABLE"))
        connection.executemany(insertion("facts"), rows)
        connection.execute(
            f"CREATE TEMP VIEW slots AS SELECT *, '{SlotKind.TRAIN}' AS kind, NULL AS answer FROM main.slots"
        )
    return connection


def data_of(path: Path) -> tuple[DataSeen, int]:
    """Return the rows that a ledger's run has, and the slot that is leased next; raises as ``reading``."""
    with reading(path) as connection:
        return next(facts_in(connection, DataSeen), NO_DATA), _next_slot(connection)


def facts_in(
    connection: sqlite3.Connection, kind: type[OneFact], *, key: str | None = None
) -> Iterator[OneFact]:
    """Yield a ledger's facts of a kind, or the one of a key.

    Raises:
        sqlite3.DatabaseError: one of them is malformed.
    """
    rows = connection.execute(
        "SELECT key, value FROM facts WHERE kind = ? AND key = coalesce(?, key) ORDER BY key",
        [kind.kind, key],
    )
    for name, value in rows:
        try:
            yield kind.decoded(name, value)
        except MalformedFactError as error:
            raise sqlite3.DatabaseError(str(error)) from error


def no_ledger(path: Path) -> StartupError:
    """Return the error for a ledger that is not there."""
    fix = "Check the path: it is ledger.sqlite in the folder coordinator of the coordinator's node.state_dir."
    return StartupError(f"there is no ledger at {path}{', which is a folder' * path.is_dir()}", fix=fix)


def next_slot_of(path: Path) -> int:
    """Return the number after the newest slot that a ledger knows of; 0 where it cannot be read."""
    try:
        with reading(path) as connection:
            return _next_slot(connection)
    except (OSError, sqlite3.Error):
        return 0


def examine(path: Path) -> LedgerReport:
    """Read a ledger from end to end. Raises FileNotFoundError: there is none."""
    try:
        with reading(path) as connection:
            # A snapshot: a coordinator may go on writing.
            connection.execute("BEGIN")
            return _findings(connection, path)
    except sqlite3.Error as error:
        return LedgerReport(str(path), problems=(f"it cannot be read: {error}",))


def read_evaluations(ledger: Path) -> tuple[Evaluation, ...]:
    """Return every evaluation, oldest version first; the one under way is the last.

    Raises:
        StartupError: the ledger is not there or cannot be read.
    """
    try:
        with reading(ledger) as connection:
            return tuple(sorted(facts_in(connection, Evaluation), key=lambda one: one.version))
    except FileNotFoundError as error:
        raise no_ledger(ledger) from error
    except sqlite3.Error as error:
        raise StartupError(
            f"the ledger {ledger} cannot be read: {error}", fix=f"See `heterorl-node ledger check {ledger}`."
        ) from error


def _findings(connection: sqlite3.Connection, path: Path) -> LedgerReport:
    damage = [row[0] for row in connection.execute(f"PRAGMA integrity_check({_SHOWN})")]
    if damage != ["ok"]:
        return LedgerReport(str(path), problems=tuple(damage))
    schema = _number(connection, "PRAGMA user_version")
    there = _column(connection, "SELECT name FROM sqlite_master UNION SELECT name FROM sqlite_temp_master")
    missing = sorted(tables().keys() - set(there))
    if missing:
        return LedgerReport(str(path), problems=(f"it is no ledger: it has no table {', '.join(missing)}",))
    malformed = tuple(islice(_malformed(connection), _SHOWN))
    if malformed:
        return LedgerReport(str(path), schema=schema, problems=malformed)
    run_id = next((owner.run_id for owner in facts_in(connection, Owner)), "")
    if schema not in (*OLDER, SCHEMA_VERSION):
        return LedgerReport(
            str(path),
            run_id=run_id,
            schema=schema,
            problems=(f"it has schema {schema}, this software knows {SCHEMA_VERSION}",),
        )
    last = _number(connection, "SELECT coalesce(max(version), 0) FROM steps")
    lost = lost_ranges(connection)
    problems = [] if run_id else ["it names no run"]
    problems += _gaps(connection, lost)
    problems += _mismatches(connection)
    problems += _damaged(connection)
    return LedgerReport(
        path=str(path),
        run_id=run_id,
        schema=schema,
        steps=_number(connection, "SELECT count(*) FROM steps"),
        last_step=max([last, *(numbers[-1] for numbers in lost)]),
        lost_steps=sum(map(len, lost)),
        generations=len(_generations(connection)),
        next_slot=_next_slot(connection),
        slots=dict(
            connection.execute(f"SELECT state, count(*) FROM slots WHERE {OF_TRAINING} GROUP BY state")
        ),
        groups=_number(connection, "SELECT count(*) FROM groups"),
        trained_groups=_number(connection, "SELECT count(*) FROM steps, json_each(group_ids)"),
        newest_version=_number(connection, "SELECT coalesce(max(number), 0) FROM versions"),
        problems=tuple(problems),
    )


def _malformed(connection: sqlite3.Connection) -> Iterator[str]:
    """Find facts that say nothing of their kind."""
    for row in connection.execute("SELECT kind, key, value FROM facts ORDER BY kind, key"):
        try:
            fact_of(row)
        except MalformedFactError as error:
            yield str(error)


def _gaps(connection: sqlite3.Connection, lost: list[range]) -> Iterator[str]:
    """Find versions without a record, and slot numbers without a slot."""
    expected, gaps = 1, 0
    for version in _column(connection, "SELECT version FROM steps ORDER BY version"):
        accepted = sum(len(range(max(expected, r.start), min(version, r.stop))) for r in lost)
        if version - expected > accepted and (gaps := gaps + 1) <= _SHOWN:
            missing = version - expected - accepted
            yield f"it has no record of {missing} of the versions {expected} to {version - 1}"
        expected = version + 1
    begins, generations = 0, _generations(connection)
    for ends, next_begins in (*generations, (_next_slot(connection), 0)):
        there = _number(
            connection, "SELECT count(*) FROM slots WHERE number >= ? AND number < ?", begins, ends
        )
        if there != max(0, ends - begins):
            yield f"it has {there} of the slots {begins} to {ends - 1}"
        begins = next_begins


def _mismatches(connection: sqlite3.Connection) -> Iterator[str]:
    for query, problem in _CONTRADICTIONS:
        for row in connection.execute(f"{query} LIMIT ?", [_SHOWN]):
            yield problem.format(*row)
    trained, named = connection.execute(
        "SELECT (SELECT count(*) FROM slots WHERE state = 'trained'), "
        "(SELECT count(DISTINCT CAST(value AS INTEGER)) FROM steps, json_each(group_ids))"
    ).fetchone()
    if trained > named:
        yield f"{trained} slots are trained, and steps name {named}"
    for one in facts_in(connection, Evaluation):
        found = _number(
            connection,
            "SELECT count(*) FROM slots WHERE state = 'evaluated' AND number >= ? AND number < ?",
            held_out_number(one.version, 0),
            held_out_number(one.version + 1, 0),
        )
        # Those of an older ledger have no slots.
        if one.finished_at_s and found and one.answers != found:
            counted = f"counts {one.answers} answers, and {found} are there"
            yield f"the evaluation of version {one.version} {counted}"


def _damaged(connection: sqlite3.Connection) -> Iterator[str]:
    """Find groups in the spool that are not what was stored."""
    rows = connection.execute("SELECT slot, digest, header, columns FROM groups ORDER BY slot")
    damaged = (slot for slot, digest, *group in rows if digest_of(group) != digest)
    for slot in islice(damaged, _SHOWN):
        yield f"the group of slot {slot} is not what was stored"


def _generations(connection: sqlite3.Connection) -> list[tuple[int, int]]:
    """Return (lost from slot, first slot) of each generation, oldest first."""
    found = sorted(facts_in(connection, Generation), key=lambda one: one.number)
    return [(one.lost_from_slot, one.first_slot) for one in found]


def lost_ranges(connection: sqlite3.Connection) -> list[range]:
    """Return the versions whose records were lost, as accepted, by generation."""
    return Generations(facts_in(connection, Generation)).lost_versions


def _next_slot(connection: sqlite3.Connection) -> int:
    newest = _number(connection, "SELECT coalesce(max(number) + 1, 0) FROM slots WHERE " + OF_TRAINING)
    return max([newest, *(first for _, first in _generations(connection))])


def _number(connection: sqlite3.Connection, query: str, *values: int) -> int:
    return int(connection.execute(query, values).fetchone()[0])


def _column(connection: sqlite3.Connection, query: str) -> Iterator[Any]:
    return (row[0] for row in connection.execute(query))
