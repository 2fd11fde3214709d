"""The tables of a ledger."""

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import xxhash

from node.coordinator.work.bad_prompts import BAD_PROMPTS
from node.coordinator.work.slot_generations import Generation
from node.coordinator.work.slots import SETTLED, SlotState
from node.errors import StartupError

SCHEMA_VERSION: Final = 2

OPEN_STATES: Final = ", ".join(f"'{state}'" for state in SlotState if state not in SETTLED)
"""As in a query."""

PAGE_BYTES: Final = 16 << 10
WAL_PAGES: Final = 4096
"""With SQLite's own values, 4 KiB and 1000 pages, a group of 1 MiB costs twice the time."""

SCHEMA: Final = """
CREATE TABLE run (run_id TEXT NOT NULL) STRICT;
CREATE TABLE learner (
    "only" INTEGER PRIMARY KEY CHECK ("only" = 1),
    node_id TEXT NOT NULL, epoch INTEGER NOT NULL, layout_digest BLOB NOT NULL,
    tokenizer_digest BLOB NOT NULL, vocabulary_size INTEGER NOT NULL, version INTEGER NOT NULL,
    chat_template_digest BLOB NOT NULL, base_root BLOB NOT NULL, base_parts BLOB NOT NULL,
    layout_summary TEXT NOT NULL, context_tokens INTEGER NOT NULL,
    text_digest BLOB NOT NULL, text_summary TEXT NOT NULL
) STRICT;
CREATE TABLE slots (
    number INTEGER PRIMARY KEY, prompt_index INTEGER NOT NULL, state TEXT NOT NULL,
    attempts TEXT NOT NULL, granted INTEGER NOT NULL, winner INTEGER NOT NULL
) STRICT;
CREATE INDEX slots_by_state ON slots (state);
CREATE TABLE groups (
    slot INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, sampler_id TEXT NOT NULL,
    spooled_at_s REAL NOT NULL, digest BLOB NOT NULL, header BLOB NOT NULL, columns BLOB NOT NULL
) STRICT;
CREATE TABLE verdicts (
    sampler_id TEXT NOT NULL, verdict TEXT NOT NULL, n INTEGER NOT NULL, PRIMARY KEY (sampler_id, verdict)
) STRICT, WITHOUT ROWID;
CREATE TABLE staleness (sampler_id TEXT PRIMARY KEY, versions INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE steps (
    version INTEGER PRIMARY KEY, group_ids TEXT NOT NULL, staleness_versions TEXT NOT NULL,
    restored_version INTEGER
) STRICT;
CREATE TABLE versions (number INTEGER PRIMARY KEY, root BLOB NOT NULL, at_s REAL NOT NULL) STRICT;
CREATE TABLE generations (
    number INTEGER PRIMARY KEY, first_slot INTEGER NOT NULL, lost_from_slot INTEGER NOT NULL,
    begun_at_s REAL NOT NULL, lost_first_version INTEGER, lost_last_version INTEGER
) STRICT;
CREATE TABLE task_options ("only" INTEGER PRIMARY KEY CHECK ("only" = 1), digest BLOB NOT NULL) STRICT;
CREATE TABLE bad_prompts (
    prompt_index INTEGER PRIMARY KEY, reason TEXT NOT NULL, detail TEXT NOT NULL, times INTEGER NOT NULL,
    slot INTEGER NOT NULL, at_s REAL NOT NULL, said_by TEXT NOT NULL
) STRICT;
CREATE TABLE data (
    "only" INTEGER PRIMARY KEY CHECK ("only" = 1), digest BLOB NOT NULL, rows INTEGER NOT NULL,
    evaluation_rows INTEGER NOT NULL, held_out_at INTEGER NOT NULL, first_slot INTEGER NOT NULL
) STRICT;
CREATE TABLE standings (
    sampler_id TEXT PRIMARY KEY, allowance INTEGER NOT NULL, expired INTEGER NOT NULL, faulted INTEGER NOT
    NULL, contradicted INTEGER NOT NULL, strikes INTEGER NOT NULL, struck_at_s REAL NOT NULL, halved_at_s REAL
    NOT NULL, quarantines INTEGER NOT NULL, quarantine TEXT NOT NULL, quarantined_at_s REAL NOT NULL,
    probed_at_s REAL NOT NULL, checks INTEGER NOT NULL, differing INTEGER NOT NULL, stake REAL NOT NULL,
    proven_at_s REAL NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE evaluations (
    version INTEGER PRIMARY KEY, first_prompt INTEGER NOT NULL, prompts INTEGER NOT NULL,
    completions INTEGER NOT NULL, temperature REAL NOT NULL, max_new_tokens INTEGER NOT NULL,
    started_at_s REAL NOT NULL, finished_at_s REAL NOT NULL,
    counted_prompts INTEGER NOT NULL, dropped_prompts INTEGER NOT NULL,
    reward_mean REAL NOT NULL, reward_standard_error REAL NOT NULL, cut_ratio REAL NOT NULL,
    tokens_mean REAL NOT NULL, sampling TEXT NOT NULL, metrics TEXT NOT NULL, answers INTEGER NOT NULL,
    samplers INTEGER NOT NULL, left_out TEXT NOT NULL, disputed_by TEXT NOT NULL
) STRICT;
CREATE TABLE evaluation_slots (
    number INTEGER PRIMARY KEY, prompt_index INTEGER NOT NULL, state TEXT NOT NULL,
    attempts TEXT NOT NULL, granted INTEGER NOT NULL, winner INTEGER NOT NULL
) STRICT;
CREATE TABLE evaluation_scores (
    version INTEGER NOT NULL, slot INTEGER NOT NULL, sampler_id TEXT NOT NULL, reward_mean REAL NOT NULL,
    cut_completions INTEGER NOT NULL, tokens INTEGER NOT NULL, metrics TEXT NOT NULL,
    PRIMARY KEY (version, slot)
) STRICT, WITHOUT ROWID;
"""

DROP_OLDEST_BAD_PROMPTS: Final = (
    "DELETE FROM bad_prompts WHERE prompt_index NOT IN "
    f"(SELECT prompt_index FROM bad_prompts ORDER BY at_s DESC LIMIT {BAD_PROMPTS})"
)

RELEASED: Final = 1
"""Schema of release 0.2.0, whose runs are upgraded while they train. Tools read it as it is."""

_FROM_RELEASED: Final = (
    " ".join(
        f"ALTER TABLE {table} ADD COLUMN {column};"
        for table, column in (
            ("standings", "checks INTEGER NOT NULL DEFAULT 0"),
            ("standings", "differing INTEGER NOT NULL DEFAULT 0"),
            ("standings", "stake REAL NOT NULL DEFAULT 0"),
            ("standings", "proven_at_s REAL NOT NULL DEFAULT 0"),
            ("steps", "restored_version INTEGER"),
            ("learner", "text_digest BLOB NOT NULL DEFAULT x''"),
            ("learner", "text_summary TEXT NOT NULL DEFAULT ''"),
        )
    )
    + " DROP TABLE IF EXISTS task; DROP TABLE IF EXISTS size_words;"
)


def prepare(connection: sqlite3.Connection, path: Path, *, run_id: str) -> None:
    """Create the tables of a new ledger, upgrade the last release's, check that one is whole and the run's.

    Raises:
        StartupError: it is of another run or has another schema.
        sqlite3.Error: it is damaged, or locked by another program.
    """
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
    connection.execute("PRAGMA synchronous = FULL")
    version = upgrade(connection)
    if version not in (0, SCHEMA_VERSION):
        raise StartupError(
            f"the ledger {path} has schema {version}, this software knows {SCHEMA_VERSION}",
            fix="Start the version of heterorl-node that wrote it.",
        )
    if version == 0:
        connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION};")
        connection.execute("INSERT INTO run VALUES (?)", (run_id,))
        connection.execute("COMMIT")
    connection.execute(DROP_OLDEST_BAD_PROMPTS)
    problems = [row[0] for row in connection.execute("PRAGMA quick_check(1)")]
    if problems != ["ok"]:
        raise sqlite3.DatabaseError(problems[0])
    owners = [row[0] for row in connection.execute("SELECT run_id FROM run")]
    if owners != [run_id]:
        raise StartupError(
            f"the ledger {path} belongs to run {', '.join(owners)!r}, configured is {run_id!r}",
            fix="Give each run a state directory of its own.",
        )


def upgrade(connection: sqlite3.Connection) -> int:
    """Upgrade a ledger of the last release; return the schema that it has now, whichever that is."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != RELEASED:
        return int(version)
    connection.executescript(f"BEGIN; {_FROM_RELEASED} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
    return SCHEMA_VERSION


def begin_generation(connection: sqlite3.Connection, generation: Generation) -> None:
    """Mark every open slot of a restored ledger as lost, and number new slots from a new generation.

    An evaluation under way is dropped: it is of a version that samplers may have left long ago.
    """
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(
        f"UPDATE slots SET state = ?, winner = 0 WHERE state IN ({OPEN_STATES})", [SlotState.LOST]
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


def digest_of(group: Iterable[bytes]) -> bytes:
    """Return the checksum of a group's parts in the spool."""
    digest = xxhash.xxh3_64()
    for part in group:
        digest.update(part)
    return digest.digest()
