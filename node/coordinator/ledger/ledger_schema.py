"""The tables of a ledger."""

import logging
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import xxhash

from node.coordinator.work.bad_prompts import BAD_PROMPTS
from node.coordinator.work.slot_generations import Generation
from node.coordinator.work.slots import HELD_OUT_FROM, SETTLED, SlotKind, SlotState
from node.errors import StartupError
from node.evaluation import COVERAGE_PERCENT

logger = logging.getLogger(__name__)

SCHEMA_VERSION: Final = 3

OPEN_STATES: Final = ", ".join(f"'{state}'" for state in SlotState if state not in SETTLED)
"""As in a query."""

PAGE_BYTES: Final = 16 << 10
WAL_PAGES: Final = 4096
"""With SQLite's own values, 4 KiB and 1000 pages, a group of 1 MiB costs twice the time."""

OF_TRAINING: Final = f"number < {HELD_OUT_FROM}"
"""Which slots are of training, by their key."""

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
    attempts TEXT NOT NULL, granted INTEGER NOT NULL, winner INTEGER NOT NULL, kind TEXT NOT NULL, answer TEXT
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
    started_at_s REAL NOT NULL, finished_at_s REAL NOT NULL, sampling TEXT NOT NULL, best_by TEXT NOT NULL,
    counted_prompts INTEGER NOT NULL, answers INTEGER NOT NULL, samplers INTEGER NOT NULL,
    reward_mean REAL, reward_standard_error REAL, cut_ratio REAL, tokens_mean REAL, metrics TEXT NOT NULL
) STRICT;
"""

DROP_OLDEST_BAD_PROMPTS: Final = (
    "DELETE FROM bad_prompts WHERE prompt_index NOT IN "
    f"(SELECT prompt_index FROM bad_prompts ORDER BY at_s DESC LIMIT {BAD_PROMPTS})"
)

READABLE: Final = (1, 2, SCHEMA_VERSION)
"""Schemas of releases 0.2 and 0.3, whose runs are upgraded while they train, and ours."""

_TO_2: Final = " ".join(
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

_OF_SCORE: Final = ("reward_mean", "reward_standard_error", "cut_ratio", "tokens_mean")
_IS_COVERED: Final = f"100 * counted_prompts >= {COVERAGE_PERCENT} * prompts"

EVALUATIONS_OF_2: Final = f"""
SELECT version, first_prompt, prompts, completions, temperature, max_new_tokens, started_at_s, finished_at_s,
    sampling, 'reward' AS best_by, counted_prompts, answers, samplers,
    {", ".join(f"CASE WHEN {_IS_COVERED} THEN {column} END AS {column}" for column in _OF_SCORE)},
    CASE WHEN {_IS_COVERED} THEN metrics ELSE '' END AS metrics
FROM %s WHERE finished_at_s > 0
"""
"""The finished evaluations of an older ledger, from the table that is named. A score stays where it has the
coverage that we ask for; the answers, one by one, go, and so does what is under way."""

SLOTS_OF_2: Final = f"SELECT *, '{SlotKind.TRAIN}' AS kind, NULL AS answer FROM %s"

TO_3: Final = f"""
ALTER TABLE slots ADD COLUMN kind TEXT NOT NULL DEFAULT '{SlotKind.TRAIN}';
ALTER TABLE slots ADD COLUMN answer TEXT;
ALTER TABLE evaluations RENAME TO older_evaluations;
CREATE TABLE evaluations {SCHEMA.partition("CREATE TABLE evaluations ")[2].partition(";")[0]};
INSERT INTO evaluations {EVALUATIONS_OF_2 % "older_evaluations"};
DROP TABLE older_evaluations;
DROP TABLE evaluation_slots;
DROP TABLE evaluation_scores;
DROP TABLE IF EXISTS task;
DROP TABLE IF EXISTS size_words;
"""

_UPGRADES: Final = {1: _TO_2, 2: TO_3}
"""Schema -> what makes the next of it."""


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
    """Upgrade a ledger of an earlier release; return the schema that it has now, whichever that is."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    while version in _UPGRADES:
        connection.executescript(f"BEGIN; {_UPGRADES[version]} PRAGMA user_version = {version + 1}; COMMIT;")
        version += 1
        note_upgrade(version)
    return int(version)


def note_upgrade(version: int) -> None:
    """Log that a ledger has this schema now."""
    notes = {3: "finished evaluations stay; one under way has to begin again, with the next version"}
    logger.info("ledger upgraded", extra={"schema": version, "note": notes.get(version, "nothing is lost")})


def begin_generation(connection: sqlite3.Connection, generation: Generation) -> None:
    """Mark every open slot of a restored ledger as lost, and number new slots from a new generation.

    Held-out ones are given up, so that an evaluation under way ends with the answers that it has.
    """
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(
        f"UPDATE slots SET state = iif({OF_TRAINING}, ?, ?), winner = 0 WHERE state IN ({OPEN_STATES})",
        [SlotState.LOST, SlotState.ABANDONED],
    )
    connection.execute("DELETE FROM groups")
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
