"""A ledger as JSON lines for analysis: a file for each table and each kind of fact, all of one moment.

A line of ``trained`` says of a group what the learner's log says of it, so that comparing the two as text
shows where they differ. The log may be ahead, as a learner tells of a step once it is durable.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from node.coordinator.ledger.fact_rows import KINDS
from node.coordinator.ledger.ledger_check import facts_in, reading
from node.coordinator.ledger.ledger_schema import OPEN_STATES
from node.coordinator.work.slots.slot import HELD_OUT_FROM, HELD_OUT_PLACES
from node.system import durable

_QUERIES: Final[Mapping[str, str]] = {
    "slots": "SELECT number, kind, prompt_index, state, granted, winner FROM slots ORDER BY number",
    "attempts": """
        SELECT number AS slot, json_extract(value, '$[0]') AS attempt,
            json_extract(value, '$[1]') AS sampler_id, json_extract(value, '$[2]') AS is_submitted,
            json_extract(value, '$[3]') AS failure
        FROM slots, json_each(attempts) ORDER BY number""",
    "trained": """
        SELECT version, ids.value AS group_id, json_extract(made.value, '$[1]') AS sampler_id,
            json_extract(staleness_versions, '$[' || ids.key || ']') AS staleness_versions
        FROM steps, json_each(group_ids) AS ids
        LEFT JOIN slots ON number = CAST(ids.value AS INTEGER)
        LEFT JOIN json_each(attempts) AS made ON json_extract(made.value, '$[0]')
            = CAST(substr(ids.value, instr(ids.value, '.') + 1) AS INTEGER)
        ORDER BY version, ids.key""",
    "waiting": f"""
        SELECT slot, attempt, sampler_id, spooled_at_s, length(header) + length(columns) AS bytes
        FROM groups JOIN slots ON slot = number WHERE state IN ({OPEN_STATES}) ORDER BY slot""",
    "answers": f"""
        SELECT (number - {HELD_OUT_FROM}) / {HELD_OUT_PLACES} AS version, number AS slot,
            json_extract(value, '$[1]') AS sampler_id, json_extract(answer, '$[0]') AS reward_mean,
            json_extract(answer, '$[1]') AS cut_completions, json_extract(answer, '$[2]') AS tokens,
            json_extract(answer, '$[3]') AS metrics
        FROM slots, json_each(attempts)
        WHERE state = 'evaluated' AND json_extract(value, '$[0]') = winner ORDER BY number""",
    "steps": "SELECT version, restored_version FROM steps ORDER BY version",
    "versions": "SELECT number, lower(hex(root)) AS root, at_s FROM versions ORDER BY number",
    "facts": "SELECT kind, key, value FROM facts ORDER BY kind, key",
}
"""File -> query."""


def export(ledger: Path, to: Path) -> dict[str, int]:
    """Write every table as a file of JSON lines, from one moment; return the rows of each.

    Each kind of fact has a file too, with every field by name. A file takes its name once it is whole.

    Raises:
        OSError: the disk is full or failing.
        sqlite3.Error: the ledger cannot be read.
        FileNotFoundError: there is none.
    """
    with reading(ledger) as connection:
        connection.execute("BEGIN")
        durable.make_directory(to)
        names = (*_QUERIES, *KINDS)
        return {name: _write(to / f"{name}.jsonl", _rows(connection, name)) for name in names}


def rows(ledger: Path, table: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of one exported file; raises as ``export``."""
    with reading(ledger) as connection:
        yield from _rows(connection, table)


def _rows(connection: sqlite3.Connection, table: str) -> Iterator[dict[str, Any]]:
    if table in KINDS:
        yield from (fact.fields() for fact in facts_in(connection, KINDS[table]))
        return
    with closing(connection.execute(_QUERIES[table])) as found:
        names = [column[0] for column in found.description]
        for row in found:
            values = zip(names, row, strict=True)
            yield {name: bool(value) if name.startswith("is_") else value for name, value in values}


def _write(path: Path, table: Iterator[dict[str, Any]]) -> int:
    written = 0
    unfinished = path.with_name(f"{path.name}.tmp")
    with unfinished.open("w") as file:
        for row in table:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
            written += 1
    unfinished.replace(path)
    return written
