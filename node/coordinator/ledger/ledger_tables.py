"""A ledger as tables for analysis: one slot's life, and all rows as Parquet files."""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from node import durable
from node.coordinator.ledger.fact_rows import KINDS
from node.coordinator.ledger.ledger_check import facts_in, reading
from node.coordinator.ledger.ledger_schema import OPEN_STATES
from node.failure import BadPrompt

ROWS_AT_ONCE: Final = 16_384
"""Rows in memory, and in a row group of a file."""

_QUERIES: Final[Mapping[str, tuple[str, str]]] = {
    "slots": (
        "number int64, prompt_index int64, state string, granted int64, winner int64",
        "SELECT number, prompt_index, state, granted, winner FROM slots ORDER BY number",
    ),
    "attempts": (
        "slot int64, attempt int64, sampler_id string, is_submitted bool, failure string",
        "SELECT number, json_extract(value, '$[0]'), json_extract(value, '$[1]'), "
        "json_extract(value, '$[2]'), json_extract(value, '$[3]') FROM slots, json_each(attempts) "
        "ORDER BY number",
    ),
    "trained": (
        "version int64, slot int64, attempt int64, staleness_versions int64",
        "SELECT version, CAST(g.value AS INTEGER), "
        "CAST(substr(g.value, instr(g.value, '.') + 1) AS INTEGER), s.value "
        "FROM steps, json_each(group_ids) AS g, json_each(staleness_versions) AS s WHERE g.key = s.key "
        "ORDER BY version",
    ),
    "waiting": (
        "slot int64, attempt int64, sampler_id string, spooled_at_s double, bytes int64",
        "SELECT slot, attempt, sampler_id, spooled_at_s, length(header) + length(columns) FROM groups "
        f"JOIN slots ON slot = number WHERE state IN ({OPEN_STATES}) ORDER BY slot",
    ),
    "versions": (
        "number int64, root string, at_s double",
        "SELECT number, hex(root), at_s FROM versions ORDER BY number",
    ),
    "facts": (
        "kind string, key string, value string",
        "SELECT kind, key, value FROM facts ORDER BY kind, key",
    ),
}
"""Columns and query of each table that is not exported as it is."""

_AS_THEY_ARE: Final = ("evaluations", "evaluation_scores")
_TYPES: Final = {"INTEGER": "int64", "TEXT": "string", "REAL": "double", "BLOB": "binary"}


@dataclass(frozen=True, slots=True)
class SlotLife:
    """The life of one slot, as a ledger tells it."""

    slot: int
    prompt_index: int
    state: str
    attempts: tuple[dict[str, Any], ...]
    """Number, sampler, whether it handed a group in, and why it failed."""
    trained_as: str
    """Id of the group that a step consumed; empty if none was."""
    version: int | None
    """Version that step made."""
    staleness_versions: int | None
    spooled_at_s: float | None
    """Unix seconds; None where the spool has no group of it, or has it no longer."""
    spooled_bytes: int | None
    bad_prompt: str
    """Why its prompt is set aside; empty if it is not."""


def read_slot(ledger: Path, number: int) -> SlotLife | None:
    """Return what the ledger knows of a slot; None: it was never leased.

    Raises:
        sqlite3.Error: the ledger cannot be read.
        FileNotFoundError: there is none.
    """
    with reading(ledger) as connection:
        connection.execute("BEGIN")
        row = connection.execute(
            "SELECT prompt_index, state, attempts FROM slots WHERE number = ?", [number]
        ).fetchone()
        if row is None:
            return None
        prompt_index, state, attempts = row
        names = ("number", "sampler_id", "is_submitted", "failure")
        trained = connection.execute(
            "SELECT g.value, version, s.value FROM steps, json_each(group_ids) AS g, "
            "json_each(staleness_versions) AS s WHERE g.key = s.key AND CAST(g.value AS INTEGER) = ?",
            [number],
        ).fetchone()
        spooled = connection.execute(
            "SELECT spooled_at_s, length(header) + length(columns) FROM groups JOIN slots ON slot = number "
            f"WHERE slot = ? AND state IN ({OPEN_STATES})",
            [number],
        ).fetchone()
        bad = next(facts_in(connection, BadPrompt, key=str(prompt_index)), None)
    trained_as, version, staleness_versions = trained or ("", None, None)
    spooled_at_s, spooled_bytes = spooled or (None, None)
    return SlotLife(
        slot=number,
        prompt_index=prompt_index,
        state=state,
        attempts=tuple(dict(zip(names, attempt, strict=False)) for attempt in json.loads(attempts)),
        trained_as=trained_as,
        version=version,
        staleness_versions=staleness_versions,
        spooled_at_s=spooled_at_s,
        spooled_bytes=spooled_bytes,
        bad_prompt="" if bad is None else f"{bad.reason}: {bad.detail}",
    )


def export(ledger: Path, to: Path) -> dict[str, int]:
    """Write every table as a Parquet file of a directory, from one moment; return the rows of each.

    Each kind of fact that there is becomes a table too, with a column for each field. A file takes its name
    once it is whole.

    Raises:
        OSError: the disk is full or failing.
        sqlite3.Error: the ledger cannot be read.
        FileNotFoundError: there is none.
    """
    with reading(ledger) as connection:
        connection.execute("BEGIN")
        durable.make_directory(to)
        written = {
            name: _write(to / f"{name}.parquet", columns, connection.execute(query))
            for name, (columns, query) in _tables(connection)
        }
        for name, kind in KINDS.items():
            if facts := [fact.fields() for fact in facts_in(connection, kind)]:
                written[name] = _write_facts(to / f"{name}.parquet", facts)
        return written


def _tables(connection: sqlite3.Connection) -> Iterator[tuple[str, tuple[str, str]]]:
    yield from _QUERIES.items()
    for table in _AS_THEY_ARE:
        info = connection.execute(f"PRAGMA table_info({table})")
        columns = ", ".join(f"{name} {_TYPES[kind]}" for _, name, kind, *_ in info)
        yield table, (columns, f"SELECT * FROM {table}")


def _write_facts(path: Path, facts: list[dict[str, Any]]) -> int:
    import pyarrow as pa  # an extra: imported only where it is used
    from pyarrow import parquet

    unfinished = path.with_name(f"{path.name}.tmp")
    parquet.write_table(pa.Table.from_pylist(facts), unfinished, compression="zstd")
    unfinished.replace(path)
    return len(facts)


def _write(path: Path, columns: str, rows: sqlite3.Cursor) -> int:
    import pyarrow as pa  # an extra: imported only where it is used
    from pyarrow import parquet

    fields = [column.split() for column in columns.split(", ")]
    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in fields])
    truths = [place for place, (_, kind) in enumerate(fields) if kind == "bool"]
    written = 0
    unfinished = path.with_name(f"{path.name}.tmp")
    with parquet.ParquetWriter(unfinished, schema, compression="zstd") as writer:
        while chunk := rows.fetchmany(ROWS_AT_ONCE):
            by_column = [list(column) for column in zip(*chunk, strict=True)]
            for place in truths:
                by_column[place] = list(map(bool, by_column[place]))
            arrays = [pa.array(column, kind) for column, kind in zip(by_column, schema.types, strict=True)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            written += len(chunk)
    unfinished.replace(path)
    return written
