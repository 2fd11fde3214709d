"""The tables of a ledger, and the migration of a ledger that older software made."""

import sqlite3
from pathlib import Path
from typing import Final

from node.coordinator.work.bad_prompts import BAD_PROMPTS
from node.coordinator.work.generations import Generation
from node.coordinator.work.slots import SETTLED, SlotState
from node.errors import StartupError

_SINCE_SCHEMA_1: Final = """
CREATE TABLE generations (
    number INTEGER PRIMARY KEY, first_slot INTEGER NOT NULL, lost_from_slot INTEGER NOT NULL,
    begun_at_s REAL NOT NULL, lost_first_version INTEGER, lost_last_version INTEGER
) STRICT;
CREATE TABLE task (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    name TEXT NOT NULL, prompts INTEGER NOT NULL, said_by TEXT NOT NULL
) STRICT;
CREATE TABLE bad_prompts (
    prompt_index INTEGER PRIMARY KEY, reason TEXT NOT NULL, detail TEXT NOT NULL,
    times INTEGER NOT NULL, slot INTEGER NOT NULL, at_s REAL NOT NULL
) STRICT;
"""

_SINCE_SCHEMA_2: Final = """
CREATE TABLE data (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    digest BLOB NOT NULL, rows INTEGER NOT NULL, evaluation_rows INTEGER NOT NULL
) STRICT;
ALTER TABLE learner ADD COLUMN chat_template_digest BLOB NOT NULL DEFAULT x'';
CREATE TABLE evaluations (
    version INTEGER PRIMARY KEY, first_prompt INTEGER NOT NULL, prompts INTEGER NOT NULL,
    completions INTEGER NOT NULL, temperature REAL NOT NULL, max_new_tokens INTEGER NOT NULL,
    started_at_s REAL NOT NULL, finished_at_s REAL NOT NULL,
    counted_prompts INTEGER NOT NULL, dropped_prompts INTEGER NOT NULL,
    reward_mean REAL NOT NULL, reward_standard_error REAL NOT NULL, cut_ratio REAL NOT NULL,
    tokens_mean REAL NOT NULL, oldest_version INTEGER NOT NULL, newest_version INTEGER NOT NULL,
    sampling TEXT NOT NULL, metrics TEXT NOT NULL
) STRICT;
CREATE TABLE evaluation_slots (
    number INTEGER PRIMARY KEY, prompt_index INTEGER NOT NULL, state TEXT NOT NULL,
    attempts TEXT NOT NULL, granted INTEGER NOT NULL, winner INTEGER NOT NULL
) STRICT;
CREATE TABLE evaluation_scores (
    slot INTEGER PRIMARY KEY, reward_mean REAL NOT NULL, cut_completions INTEGER NOT NULL,
    tokens INTEGER NOT NULL, oldest_version INTEGER NOT NULL, newest_version INTEGER NOT NULL,
    metrics TEXT NOT NULL
) STRICT;
"""

_SINCE_SCHEMA_3: Final = """
ALTER TABLE learner ADD COLUMN base_root BLOB NOT NULL DEFAULT x'';
ALTER TABLE learner ADD COLUMN base_parts BLOB NOT NULL DEFAULT x'';
CREATE TABLE task_options (only INTEGER PRIMARY KEY CHECK (only = 1), digest BLOB NOT NULL) STRICT;
ALTER TABLE data ADD COLUMN held_out_at INTEGER NOT NULL DEFAULT 0;
ALTER TABLE data ADD COLUMN first_slot INTEGER NOT NULL DEFAULT 0;
UPDATE data SET held_out_at = rows - evaluation_rows;
ALTER TABLE learner ADD COLUMN layout_summary TEXT NOT NULL DEFAULT '';
CREATE TABLE standings (
    sampler_id TEXT PRIMARY KEY, allowance INTEGER NOT NULL, expired INTEGER NOT NULL, faulted INTEGER NOT
    NULL, contradicted INTEGER NOT NULL, strikes INTEGER NOT NULL, struck_at_s REAL NOT NULL, halved_at_s REAL
    NOT NULL, quarantines INTEGER NOT NULL, quarantine TEXT NOT NULL, quarantined_at_s REAL NOT NULL,
    probed_at_s REAL NOT NULL
) STRICT, WITHOUT ROWID;
ALTER TABLE bad_prompts ADD COLUMN said_by TEXT NOT NULL DEFAULT '[]';
CREATE TABLE size_words (
    sampler_id TEXT PRIMARY KEY, task TEXT NOT NULL, prompts INTEGER NOT NULL
) STRICT;
ALTER TABLE learner ADD COLUMN context_tokens INTEGER NOT NULL DEFAULT 0;
DELETE FROM evaluations WHERE finished_at_s = 0 OR oldest_version <> newest_version;
DELETE FROM evaluation_slots;
DROP TABLE evaluation_scores;
CREATE TABLE evaluation_scores (
    version INTEGER NOT NULL, slot INTEGER NOT NULL, sampler_id TEXT NOT NULL, reward_mean REAL NOT NULL,
    cut_completions INTEGER NOT NULL, tokens INTEGER NOT NULL, metrics TEXT NOT NULL,
    PRIMARY KEY (version, slot)
) STRICT, WITHOUT ROWID;
ALTER TABLE evaluations DROP COLUMN oldest_version;
ALTER TABLE evaluations DROP COLUMN newest_version;
ALTER TABLE evaluations ADD COLUMN answers INTEGER NOT NULL DEFAULT 0;
ALTER TABLE evaluations ADD COLUMN samplers INTEGER NOT NULL DEFAULT 1;
ALTER TABLE evaluations ADD COLUMN left_out TEXT NOT NULL DEFAULT '';
ALTER TABLE evaluations ADD COLUMN disputed_by TEXT NOT NULL DEFAULT '';
"""

_SINCE: Final = {1: _SINCE_SCHEMA_1, 2: _SINCE_SCHEMA_2, 3: _SINCE_SCHEMA_3}
"""What the next schema added to each one."""

SCHEMA_VERSION: Final = max(_SINCE) + 1

_SCHEMA: Final = f"""
CREATE TABLE run (run_id TEXT NOT NULL) STRICT;
CREATE TABLE learner (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    node_id TEXT NOT NULL, epoch INTEGER NOT NULL, layout_digest BLOB NOT NULL,
    tokenizer_digest BLOB NOT NULL, vocabulary_size INTEGER NOT NULL, version INTEGER NOT NULL
) STRICT;
CREATE TABLE slots (
    number INTEGER PRIMARY KEY, prompt_index INTEGER NOT NULL, state TEXT NOT NULL,
    attempts TEXT NOT NULL, granted INTEGER NOT NULL, winner INTEGER NOT NULL
) STRICT;
CREATE INDEX slots_by_state ON slots (state);
CREATE TABLE groups (
    slot INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, sampler_id TEXT NOT NULL,
    spooled_at_s REAL NOT NULL, digest BLOB NOT NULL, data BLOB NOT NULL
) STRICT;
CREATE TABLE verdicts (
    sampler_id TEXT NOT NULL, verdict TEXT NOT NULL, n INTEGER NOT NULL, PRIMARY KEY (sampler_id, verdict)
) STRICT, WITHOUT ROWID;
CREATE TABLE staleness (sampler_id TEXT PRIMARY KEY, versions INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE steps (
    version INTEGER PRIMARY KEY, group_ids TEXT NOT NULL, staleness_versions TEXT NOT NULL
) STRICT;
CREATE TABLE versions (number INTEGER PRIMARY KEY, root BLOB NOT NULL, at_s REAL NOT NULL) STRICT;
{"".join(_SINCE.values())}"""


def prepare(connection: sqlite3.Connection, path: Path, *, run_id: str) -> None:
    """Create the tables of a new ledger, migrate an older one, check that it is whole and the run's.

    Raises:
        StartupError: it is of another run or made by newer software.
        sqlite3.Error: it is damaged, or locked by another program.
    """
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if not 0 <= version <= SCHEMA_VERSION:
        raise StartupError(
            f"the ledger {path} has schema {version}, this software knows {SCHEMA_VERSION}",
            fix="Start the version of heterorl-node that wrote it, or a newer one.",
        )
    if version == 0:
        connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION};")
        connection.execute("INSERT INTO run VALUES (?)", (run_id,))
        connection.execute("COMMIT")
    migrate(connection)
    connection.execute(
        "DELETE FROM bad_prompts WHERE prompt_index NOT IN "
        "(SELECT prompt_index FROM bad_prompts ORDER BY at_s DESC LIMIT ?)",
        [BAD_PROMPTS],
    )
    problems = [row[0] for row in connection.execute("PRAGMA quick_check(1)")]
    if problems != ["ok"]:
        raise sqlite3.DatabaseError(problems[0])
    owners = [row[0] for row in connection.execute("SELECT run_id FROM run")]
    if owners != [run_id]:
        raise StartupError(
            f"the ledger {path} belongs to run {', '.join(owners)!r}, configured is {run_id!r}",
            fix="Give each run a state directory of its own.",
        )


def migrate(connection: sqlite3.Connection) -> None:
    """Migrate a ledger of an older schema to this software's, in place."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    added = "".join(script for since, script in _SINCE.items() if since >= version)
    if version < SCHEMA_VERSION:
        connection.executescript(f"BEGIN; {added} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")


def begin_generation(connection: sqlite3.Connection, generation: Generation) -> None:
    """Mark every open slot of a restored ledger as lost, and number new slots from a new generation.

    An evaluation under way is dropped: it is of a version that samplers may have left long ago.
    """
    migrate(connection)
    open_states = sorted(set(SlotState) - SETTLED)
    marks = ", ".join("?" * len(open_states))
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(
        f"UPDATE slots SET state = ?, winner = 0 WHERE state IN ({marks})", [SlotState.LOST, *open_states]
    )
    connection.execute("DELETE FROM groups")
    under_way = "(SELECT version FROM evaluations WHERE finished_at_s = 0)"
    connection.execute(f"DELETE FROM evaluation_scores WHERE version IN {under_way}")
    for table in ("evaluations WHERE finished_at_s = 0", "evaluation_slots"):
        connection.execute(f"DELETE FROM {table}")
    connection.execute(
        "INSERT INTO generations VALUES ((SELECT count(*) + 1 FROM generations), ?, ?, ?, NULL, NULL)",
        [generation.first_slot, generation.lost_from_slot, generation.begun_at_s],
    )
    connection.execute("COMMIT")
