"""The ledger: one SQLite file that holds every lease, group, verdict and step of a run.

The coordinator that holds its lock writes it; anyone may read it meanwhile, as a backup does. Each
transaction is on disk (WAL, synchronous=FULL) before anyone is told of it. SQLite keeps no checksum of what
it stores, so each group in the spool carries its own. A row has the fields of its value, in their order.

Blocking: one thread calls this, never the event loop's.
"""

import contextlib
import json
import sqlite3
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import astuple
from pathlib import Path
from typing import Any, Final, Self

from node import durable
from node.coordinator.ledger.ledger_schema import OPEN_STATES, digest_of, prepare
from node.coordinator.work.accounts import Balance, Transaction
from node.coordinator.work.bad_prompts import BAD_PROMPTS
from node.coordinator.work.evaluation.evaluations import EvaluationBalance, EvaluationChange
from node.coordinator.work.evaluation.scores import PromptScore
from node.coordinator.work.generations import Generation
from node.coordinator.work.model_check import Learner
from node.coordinator.work.slot_table import SlotBalance
from node.coordinator.work.slots import (
    SETTLED,
    UNTRAINED,
    Attempt,
    Slot,
    SlotState,
    group_id,
    slot_and_attempt,
)
from node.coordinator.work.standing import Standing
from node.coordinator.work.task_size import NO_DATA, DataSeen, SizeWord, TaskSize
from node.coordinator.work.version_log import VERSIONS_REMEMBERED, Announced
from node.errors import Reason, RefusedError, StartupError
from node.failure import BadPrompt, Failure
from node.file_lock import FileLock
from node.identity.files import write_secret
from node.rollout import EncodedGroup, Verdict
from node.run import Evaluation, StepRecord

FILE_NAME: Final = "ledger.sqlite"

_LOCK_TIMEOUT_S: Final = 1.0
"""Longest wait for another writer: a tool in a person's hands, or a backup of a killed ledger."""


def lock_ledger(ledger: Path) -> FileLock:
    """Lock a ledger for writing; it need not exist yet. Readers need no lock.

    Raises:
        StartupError: another process has the lock, or nothing can be locked there.
    """
    return FileLock.take(
        ledger.with_name(f"{ledger.name}.lock"),
        of=f"The ledger {ledger}",
        fix="Stop the coordinator of this run.",
    )


def accept_loss(ledger: Path, *, first_slot: int) -> None:
    """Accept whatever was lost before the generation that begins with a slot; durable on return.

    The mark is a file beside the ledger, gone from the disk before the ledger records what was lost: one in
    the ledger would be put back with it, and slots be leased again.
    """
    write_secret(_acceptance(ledger), f"{first_slot}\n".encode())


def is_loss_accepted(ledger: Path, first_slot: int) -> bool:
    """Whether the loss before this generation was accepted, and has not been claimed since."""
    with contextlib.suppress(OSError):
        return _acceptance(ledger).read_bytes() == f"{first_slot}\n".encode()
    return False


def _spend_acceptance(ledger: Path) -> None:
    _acceptance(ledger).unlink(missing_ok=True)
    durable.sync(ledger.parent)


def _acceptance(ledger: Path) -> Path:
    return ledger.with_name(f"{ledger.name}.accepts-loss")


class Ledger:
    """An open ledger; nobody else can open it for writing meanwhile."""

    def __init__(self, connection: sqlite3.Connection, lock: FileLock, path: Path) -> None:
        self._connection = connection
        self._path = path
        self._lock = lock

    @classmethod
    def open(cls, path: Path, *, run_id: str) -> Self:
        """Open the run's ledger; make it where there is none.

        Raises:
            StartupError: it is damaged, locked, of another run or made by newer software.
        """
        durable.make_directory(path.parent)
        with ExitStack() as opened:
            lock = lock_ledger(path)
            opened.callback(lock.release)
            try:
                connection = sqlite3.connect(
                    path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
                )
                opened.callback(connection.close)
                prepare(connection, path, run_id=run_id)
            except sqlite3.Error as error:
                raise _startup_error(path, error) from error
            opened.pop_all()
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
        generations = tuple(map(_generation, rows("SELECT * FROM generations ORDER BY number")))
        slots = SlotBalance(
            open_ones=tuple(
                _slot(row)
                for row in rows(f"SELECT * FROM slots WHERE state IN ({OPEN_STATES}) ORDER BY number")
            ),
            settled={state: n for state, n in settled.items() if state in SETTLED},
            next_slot=rows(
                "SELECT max(coalesce((SELECT max(number) + 1 FROM slots), 0), "
                "coalesce((SELECT max(first_slot) FROM generations), 0))"
            ).fetchone()[0],
            lost=tuple(n for (n,) in rows("SELECT number FROM slots WHERE state = ?", [SlotState.LOST])),
            found=tuple(
                number
                for (number,) in rows(
                    "SELECT DISTINCT slots.number FROM slots JOIN generations "
                    "ON slots.number >= lost_from_slot AND slots.number < first_slot"
                )
            ),
            generations=generations,
            data=next((DataSeen(*row) for _, *row in rows("SELECT * FROM data")), NO_DATA),
        )
        return Balance(
            slots=slots,
            spooled_at_s=dict(rows("SELECT slot, spooled_at_s FROM groups").fetchall()),
            spooled_bytes=dict(rows("SELECT slot, length(header) + length(columns) FROM groups").fetchall()),
            verdicts=tuple(
                (sampler_id, Verdict(verdict), n) for sampler_id, verdict, n in rows("SELECT * FROM verdicts")
            ),
            staleness=tuple(rows("SELECT * FROM staleness").fetchall()),
            last_step=next(map(_step, rows("SELECT * FROM steps ORDER BY version DESC LIMIT 1")), None),
            learner=next((Learner(*row) for _, *row in rows("SELECT * FROM learner")), None),
            announced=tuple(
                Announced(*row)
                for row in rows("SELECT * FROM versions ORDER BY number DESC LIMIT ?", [VERSIONS_REMEMBERED])
            ),
            accepts_loss=bool(generations) and is_loss_accepted(self._path, generations[-1].first_slot),
            bad_prompts=tuple(
                _bad_prompt(row)
                for row in rows("SELECT * FROM bad_prompts ORDER BY at_s DESC LIMIT ?", [BAD_PROMPTS])
            ),
            standings=tuple(Standing(*row) for row in rows("SELECT * FROM standings")),
            size_words=tuple(SizeWord(*row) for row in rows("SELECT * FROM size_words ORDER BY rowid")),
            task=next((TaskSize(*row) for _, *row in rows("SELECT * FROM task")), None),
            evaluations=EvaluationBalance(
                tuple(Evaluation(*row) for row in rows("SELECT * FROM evaluations ORDER BY version")),
                tuple(_slot(row) for row in rows("SELECT * FROM evaluation_slots ORDER BY number")),
                tuple(
                    (version, PromptScore(*row))
                    for version, *row in rows("SELECT * FROM evaluation_scores ORDER BY version, slot")
                ),
            ),
            task_digest=next((digest for _, digest in rows("SELECT * FROM task_options")), b""),
        )

    def record(self, *transactions: Transaction) -> None:
        """Put transactions on disk, all of them or none, with one sync.

        Raises:
            RefusedError: DISK, where the disk is full or fails; nothing was changed.
        """
        try:
            if any(transaction.generation is not None for transaction in transactions):
                _spend_acceptance(self._path)
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                for transaction in transactions:
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

    def group(self, slot: int) -> EncodedGroup | None:
        """Return the group in the spool for ``slot``; None where there is none.

        Raises:
            RefusedError: DAMAGED, where the bytes are not those that were stored.
        """
        try:
            row = self._connection.execute(
                "SELECT attempt, sampler_id, spooled_at_s, digest, header, columns FROM groups "
                "WHERE slot = ?",
                (slot,),
            ).fetchone()
        except sqlite3.DatabaseError as error:
            raise RefusedError(Reason.DAMAGED, f"the group of slot {slot} cannot be read: {error}") from error
        if row is None:
            return None
        attempt, sampler_id, spooled_at_s, digest, header, columns = row
        if digest_of((header, columns)) != digest:
            raise RefusedError(Reason.DAMAGED, f"the group of slot {slot} is not what was stored")
        name = group_id(slot, attempt)
        return EncodedGroup(header, columns, name, sampler_id, spooled_at_s=spooled_at_s)

    def _write(self, transaction: Transaction) -> None:
        put, write_each = self._put, self._write_each
        put("slots", *map(_row, transaction.slots))
        out_of_play = ((slot.number,) for slot in transaction.slots if slot.state not in UNTRAINED)
        write_each("DELETE FROM groups WHERE slot = ?", out_of_play)
        if (stored := transaction.stored) is not None:
            whose = (*slot_and_attempt(stored.group_id), stored.sampler_id, stored.spooled_at_s)
            put("groups", (*whose, digest_of(stored.parts), *stored.parts), how="INSERT")
        write_each(
            "INSERT INTO verdicts VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET n = n + 1",
            ((sampler_id, verdict.value) for sampler_id, verdict in transaction.verdicts),
        )
        write_each(
            "INSERT INTO staleness VALUES (?, ?) "
            "ON CONFLICT DO UPDATE SET versions = versions + excluded.versions",
            transaction.staleness,
        )
        for step in transaction.steps:
            row = (step.version, json.dumps(step.group_ids), json.dumps(step.staleness_versions))
            put("steps", row, how="INSERT")
        if (generation := transaction.generation) is not None:
            *columns, lost = astuple(generation)
            first_and_last = (None, None) if lost is None else (lost.start, lost.stop - 1)
            put("generations", (*columns, *first_and_last))
        put("versions", *map(astuple, transaction.announced), how="INSERT OR IGNORE")
        write_each(
            "DELETE FROM bad_prompts WHERE prompt_index = ?", ((n,) for n in transaction.prompts.lifted)
        )
        for bad in transaction.prompts.bad:
            put("bad_prompts", (*astuple(bad)[:-2], json.dumps(bad.said_by)))
        put("standings", *map(_flat, transaction.standings))
        write_each(
            "DELETE FROM size_words WHERE sampler_id = ?", ((w.sampler_id,) for w in transaction.size_words)
        )
        put("size_words", *(astuple(w) for w in transaction.size_words if w.prompts))
        for table, only in (
            ("task", transaction.task),
            ("data", transaction.data),
            ("learner", transaction.learner),
        ):
            if only is not None:
                put(table, (1, *astuple(only)))
        if transaction.task_digest is not None:
            put("task_options", (1, transaction.task_digest))
        if transaction.evaluation is not None:
            self._write_evaluation(transaction.evaluation)

    def _write_evaluation(self, change: EvaluationChange) -> None:
        put, write_each = self._put, self._write_each
        evaluation = change.evaluation
        put("evaluations", *map(astuple, change.recomputed))
        write_each(
            "DELETE FROM evaluation_scores WHERE sampler_id = ?", ((one,) for one in change.removed_samplers)
        )
        write_each("DELETE FROM evaluation_scores WHERE version = ?", ((n,) for n in change.forgotten))
        if evaluation is None:
            return
        put("evaluations", astuple(evaluation))
        if change.score is not None:
            put("evaluation_scores", (evaluation.version, *astuple(change.score)), how="INSERT")
        put("evaluation_slots", *map(_row, change.slots))
        if evaluation.finished_at_s:
            self._connection.execute("DELETE FROM evaluation_slots")
            write_each(
                "DELETE FROM evaluation_scores WHERE version = ? AND slot = ?",
                ((evaluation.version, slot) for slot in change.uncounted),
            )

    def _write_each(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
        if parameters := tuple(rows):  # SQLite takes 3 us for a statement without any
            self._connection.executemany(statement, parameters)

    def _put(self, table: str, *rows: tuple[Any, ...], how: str = "INSERT OR REPLACE") -> None:
        if rows:
            marks = ", ".join("?" * len(rows[0]))
            self._connection.executemany(f"{how} INTO {table} VALUES ({marks})", rows)


def _startup_error(path: Path, error: sqlite3.Error) -> StartupError:
    code = getattr(error, "sqlite_errorcode", None)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StartupError(
            f"the ledger {path} is locked by another program", fix="Let it finish, or stop it."
        )
    if code == sqlite3.SQLITE_CANTOPEN:
        return StartupError(
            f"the ledger {path} cannot be opened: {error}", fix="Check the path and its permissions."
        )
    return StartupError(
        f"the ledger {path} cannot be read: {error}",
        fix="Restore it, with its -wal file, from a backup, or begin a new run.",
    )


def _step(row: tuple[int, str, str]) -> StepRecord:
    version, group_ids, staleness_versions = row
    return StepRecord(version, tuple(json.loads(group_ids)), tuple(json.loads(staleness_versions)))


def _generation(row: tuple[Any, ...]) -> Generation:
    number, first_slot, lost_from_slot, begun_at_s, first, last = row
    lost = None if first is None else range(first, last + 1)
    return Generation(number, first_slot, lost_from_slot, begun_at_s, lost)


def _bad_prompt(row: tuple[int, str, str, int, int, float, str]) -> BadPrompt:
    prompt_index, reason, detail, times, slot, at_s, said_by = row
    return BadPrompt(prompt_index, Failure(reason), detail, times, slot, at_s, tuple(json.loads(said_by)))


def _flat(value: Any) -> tuple[Any, ...]:
    """Return the fields of a dataclass that holds no other: ``astuple`` copies each deeply, in 15 us."""
    return tuple(getattr(value, name) for name in value.__slots__)


def _row(slot: Slot) -> tuple[int, int, str, str, int, int]:
    attempts = json.dumps([_flat(attempt) for attempt in slot.attempts])
    return (slot.number, slot.prompt_index, slot.state.value, attempts, slot.granted, slot.winner)


def _slot(row: tuple[int, int, str, str, int, int]) -> Slot:
    number, prompt_index, state, attempts, granted, winner = row
    held = tuple(_attempt(*attempt) for attempt in json.loads(attempts))
    return Slot(number, prompt_index, SlotState(state), held, granted, winner)


def _attempt(number: int, holder: str, is_submitted: bool, failure: str | None = None) -> Attempt:
    return Attempt(number, holder, is_submitted, None if failure is None else Failure(failure))
