"""The ledger: one SQLite file that holds every lease, group, verdict and step of a run.

One coordinator writes it, which holds its lock; anyone may read it meanwhile, as a backup does.

Each transaction is on disk (WAL, synchronous=FULL) before anyone is told of it. SQLite keeps
no checksum of what it stores, so each group in the spool carries its own.

Blocking: one thread calls this, never the event loop's.
"""

import json
import sqlite3
from pathlib import Path
from typing import Final, Self

import xxhash

from node import durable
from node.coordinator.ledger import accepted_loss
from node.coordinator.ledger.ledger_schema import prepare
from node.coordinator.work.accounts import Balance, StoredGroup, Transaction
from node.coordinator.work.bad_prompts import BAD_PROMPTS
from node.coordinator.work.generations import Generation
from node.coordinator.work.group_check import Learner
from node.coordinator.work.slots import SETTLED, UNTRAINED, Attempt, Slot, SlotState
from node.coordinator.work.task_size import TaskSize
from node.coordinator.work.version_log import VERSIONS_REMEMBERED, Announced
from node.errors import Reason, RefusedError, StartupError
from node.failure import BadPrompt, Failure
from node.file_lock import FileLock
from node.rollout import Verdict
from node.run import StepRecord

FILE_NAME: Final = "ledger.sqlite"

_STEP_COLUMNS: Final = "version, group_ids, staleness_versions"

_LOCK_TIMEOUT_S: Final = 1.0
"""Longest wait for somebody else who writes: a tool in a person's hands, or a backup of a killed ledger."""


def lock_ledger(ledger: Path) -> FileLock:
    """Take the right to write a ledger, which need not exist yet. Who only reads needs none.

    Raises:
        StartupError: another process has it, or nothing can be locked there.
    """
    return FileLock.take(
        ledger.with_name(f"{ledger.name}.lock"),
        of=f"The ledger {ledger}",
        fix="Stop the coordinator of this run.",
    )


class Ledger:
    """An open ledger; nobody else can open it to write meanwhile."""

    def __init__(self, connection: sqlite3.Connection, lock: FileLock, path: Path) -> None:
        self._connection = connection
        self._path = path
        self._lock = lock

    @classmethod
    def open(cls, path: Path, *, run_id: str) -> Self:
        """Open the run's ledger, making it where there is none.

        Raises:
            StartupError: it is damaged, locked, of another run or from a newer software.
        """
        durable.make_directory(path.parent)
        lock = lock_ledger(path)
        try:
            connection = sqlite3.connect(
                path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            lock.release()
            raise StartupError(
                f"the ledger {path} cannot be opened: {error}", fix="Check the path and its permissions."
            ) from error
        try:
            prepare(connection, path, run_id=run_id)
        except (sqlite3.Error, StartupError) as error:
            connection.close()
            lock.release()
            raise (_startup_error(path, error) if isinstance(error, sqlite3.Error) else error) from error
        return cls(connection, lock, path)

    def close(self) -> None:
        self._connection.close()
        self._lock.release()

    def balance(self) -> Balance:
        """Read what the accounts start from."""
        rows = self._connection.execute
        settled = {
            SlotState(state): n for state, n in rows("SELECT state, count(*) FROM slots GROUP BY state")
        }
        open_states = sorted(set(SlotState) - SETTLED)
        marks = ", ".join("?" * len(open_states))
        task = rows("SELECT name, prompts, said_by FROM task").fetchone()
        learner = rows(
            "SELECT node_id, epoch, layout_digest, tokenizer_digest, vocabulary_size, version FROM learner"
        ).fetchone()
        generations = tuple(map(_generation, rows("SELECT * FROM generations ORDER BY number")))
        return Balance(
            slots=tuple(
                _slot(row)
                for row in rows(
                    "SELECT number, prompt_index, state, attempts, granted, winner FROM slots "
                    f"WHERE state IN ({marks}) ORDER BY number",
                    open_states,
                )
            ),
            settled={state: n for state, n in settled.items() if state not in open_states},
            spooled_at_s=dict(rows("SELECT slot, spooled_at_s FROM groups").fetchall()),
            verdicts=tuple(
                (sampler_id, Verdict(verdict), n)
                for sampler_id, verdict, n in rows("SELECT sampler_id, verdict, n FROM verdicts")
            ),
            staleness=tuple(rows("SELECT sampler_id, versions FROM staleness").fetchall()),
            last_step=next(
                map(_step, rows(f"SELECT {_STEP_COLUMNS} FROM steps ORDER BY version DESC LIMIT 1")), None
            ),
            learner=Learner(*learner) if learner is not None else None,
            announced=tuple(
                Announced(*row)
                for row in rows(
                    "SELECT number, root, at_s FROM versions ORDER BY number DESC LIMIT ?",
                    [VERSIONS_REMEMBERED],
                )
            ),
            next_slot=rows(
                "SELECT max(coalesce((SELECT max(number) + 1 FROM slots), 0), "
                "coalesce((SELECT max(first_slot) FROM generations), 0))"
            ).fetchone()[0],
            generations=generations,
            accepts_loss=bool(generations)
            and accepted_loss.is_given(self._path, first_slot=generations[-1].first_slot),
            lost_slots=tuple(
                number for (number,) in rows("SELECT number FROM slots WHERE state = ?", [SlotState.LOST])
            ),
            found_slots=tuple(
                number
                for (number,) in rows(
                    "SELECT DISTINCT slots.number FROM slots JOIN generations "
                    "ON slots.number >= lost_from_slot AND slots.number < first_slot"
                )
            ),
            bad_prompts=tuple(
                BadPrompt(prompt_index, Failure(reason), detail, times, slot, at_s)
                for prompt_index, reason, detail, times, slot, at_s in rows(
                    "SELECT prompt_index, reason, detail, times, slot, at_s FROM bad_prompts "
                    "ORDER BY at_s DESC LIMIT ?",
                    [BAD_PROMPTS],
                )
            ),
            task=TaskSize(*task) if task is not None else None,
        )

    def record(self, transaction: Transaction) -> None:
        """Put a transaction on disk, whole or not at all.

        Raises:
            RefusedError: DISK, where the disk is full or fails; nothing was changed.
        """
        try:
            if transaction.generation is not None:
                accepted_loss.spend(self._path)
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._write(transaction)
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
            raise  # our mistake, not the disk's
        except (sqlite3.Error, OSError) as error:
            raise RefusedError(
                Reason.DISK,
                f"the ledger could not be written: {error}",
                fix="free space on the coordinator's disk; the same request may be sent again",
            ) from error

    def group(self, slot: int) -> StoredGroup | None:
        """Give the group in the spool for ``slot``; None where there is none.

        Raises:
            RefusedError: DAMAGED, where the bytes are not those that were stored.
        """
        try:
            row = self._connection.execute(
                "SELECT attempt, sampler_id, spooled_at_s, data, digest FROM groups WHERE slot = ?", (slot,)
            ).fetchone()
        except sqlite3.DatabaseError as error:
            raise RefusedError(Reason.DAMAGED, f"the group of slot {slot} cannot be read: {error}") from error
        if row is None:
            return None
        attempt, sampler_id, spooled_at_s, data, digest = row
        if _digest(data) != digest:
            raise RefusedError(Reason.DAMAGED, f"the group of slot {slot} is not what was stored")
        return StoredGroup(slot, attempt, sampler_id, spooled_at_s, data)

    def steps(self) -> tuple[StepRecord, ...]:
        """Read every step record, oldest first."""
        rows = self._connection.execute(f"SELECT {_STEP_COLUMNS} FROM steps ORDER BY version")
        return tuple(map(_step, rows))

    def _write(self, transaction: Transaction) -> None:
        write, write_each = self._connection.execute, self._connection.executemany
        write_each("INSERT OR REPLACE INTO slots VALUES (?, ?, ?, ?, ?, ?)", map(_row, transaction.slots))
        out_of_play = ((slot.number,) for slot in transaction.slots if slot.state not in UNTRAINED)
        write_each("DELETE FROM groups WHERE slot = ?", out_of_play)
        if (stored := transaction.stored) is not None:
            write(
                "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?)",
                (
                    stored.slot,
                    stored.attempt,
                    stored.sampler_id,
                    stored.spooled_at_s,
                    _digest(stored.data),
                    stored.data,
                ),
            )
        write_each(
            "INSERT INTO verdicts VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET n = n + 1",
            ((sampler_id, verdict.value) for sampler_id, verdict in transaction.verdicts),
        )
        write_each(
            "INSERT INTO staleness VALUES (?, ?) "
            "ON CONFLICT DO UPDATE SET versions = versions + excluded.versions",
            transaction.staleness,
        )
        write_each(
            "INSERT INTO steps VALUES (?, ?, ?)",
            (
                (step.version, json.dumps(step.group_ids), json.dumps(step.staleness_versions))
                for step in transaction.steps
            ),
        )
        if (generation := transaction.generation) is not None:
            lost = generation.lost_versions
            write(
                "INSERT OR REPLACE INTO generations VALUES (?, ?, ?, ?, ?, ?)",
                (
                    generation.number,
                    generation.first_slot,
                    generation.lost_from_slot,
                    generation.begun_at_s,
                    None if lost is None else lost.start,
                    None if lost is None else lost.stop - 1,
                ),
            )
        write_each(
            "INSERT OR IGNORE INTO versions VALUES (?, ?, ?)",
            ((entry.number, entry.root, entry.at_s) for entry in transaction.announced),
        )
        write_each(
            "DELETE FROM bad_prompts WHERE prompt_index = ?", ((n,) for n in transaction.lifted_prompts)
        )
        write_each(
            "INSERT OR REPLACE INTO bad_prompts VALUES (?, ?, ?, ?, ?, ?)",
            (
                (bad.prompt_index, bad.reason.value, bad.detail, bad.times, bad.slot, bad.at_s)
                for bad in transaction.bad_prompts
            ),
        )
        if (task := transaction.task) is not None:
            write("INSERT OR REPLACE INTO task VALUES (1, ?, ?, ?)", (task.name, task.prompts, task.said_by))
        if (learner := transaction.learner) is not None:
            write(
                "INSERT OR REPLACE INTO learner VALUES (1, ?, ?, ?, ?, ?, ?)",
                (
                    learner.node_id,
                    learner.epoch,
                    learner.layout_digest,
                    learner.tokenizer_digest,
                    learner.vocabulary_size,
                    learner.version,
                ),
            )


def _startup_error(path: Path, error: sqlite3.Error) -> StartupError:
    if getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StartupError(
            f"the ledger {path} is locked by another program", fix="Let it finish, or stop it."
        )
    return StartupError(
        f"the ledger {path} cannot be read: {error}",
        fix="Restore it, with its -wal file, from a backup, or begin a new run.",
    )


def _step(row: tuple[int, str, str]) -> StepRecord:
    version, group_ids, staleness_versions = row
    return StepRecord(version, tuple(json.loads(group_ids)), tuple(json.loads(staleness_versions)))


def _generation(row: tuple[int, int, int, float, int | None, int | None]) -> Generation:
    number, first_slot, lost_from_slot, begun_at_s, first, last = row
    lost = None if first is None or last is None else range(first, last + 1)
    return Generation(number, first_slot, lost_from_slot, begun_at_s, lost)


def _row(slot: Slot) -> tuple[int, int, str, str, int, int]:
    attempts = json.dumps([(a.number, a.holder, a.is_submitted, a.failure) for a in slot.attempts])
    return (slot.number, slot.prompt_index, slot.state.value, attempts, slot.granted, slot.winner)


def _slot(row: tuple[int, int, str, str, int, int]) -> Slot:
    number, prompt_index, state, attempts, granted, winner = row
    held = tuple(_attempt(*attempt) for attempt in json.loads(attempts))
    return Slot(number, prompt_index, SlotState(state), held, granted, winner)


def _attempt(number: int, holder: str, is_submitted: bool, failure: str | None = None) -> Attempt:
    return Attempt(number, holder, is_submitted, None if failure is None else Failure(failure))


def _digest(data: bytes) -> bytes:
    return xxhash.xxh3_64_digest(data)
