"""The ledger: one SQLite file that holds every lease, group, verdict and step of a run.

The coordinator that holds its lock writes it; anyone may read it meanwhile, as a backup does. Each
transaction is on disk (WAL, synchronous=FULL) before anyone is told of it. SQLite keeps no checksum of what
it stores, so each group in the spool carries its own.

Blocking: one thread calls this, never the event loop's.
"""

import contextlib
import sqlite3
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

from node.coordinator.ledger.ledger_rows import LedgerRows, damaged
from node.coordinator.ledger.ledger_schema import prepare
from node.coordinator.work.balance import Balance, Transaction
from node.coordinator.work.slots.slot_generations import Generation
from node.errors import Reason, RefusedError, StartupError
from node.identity.files import write_secret
from node.system import durable
from node.system.file_lock import FileLock
from node.values.fact import MalformedFactError
from node.values.groups.rollout import EncodedGroup

FILE_NAME: Final = "ledger.sqlite"

_DISK: Final = "the coordinator's disk"

_LOCK_TIMEOUT_S: Final = 1.0
"""Longest wait for another writer: a tool in a person's hands, or a backup of a killed ledger."""


def lock_of(ledger: Path) -> Path:
    """Return the file whose lock is a ledger's."""
    return ledger.with_name(f"{ledger.name}.lock")


def lock_ledger(ledger: Path) -> FileLock:
    """Lock a ledger for writing; it need not exist yet. Readers need no lock.

    Raises:
        StartupError: another process has the lock, or nothing can be locked there.
    """
    return FileLock.take(
        lock_of(ledger),
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
    """Whether the loss before this generation was accepted, and has not been claimed since.

    Raises OSError: the mark cannot be read.
    """
    with contextlib.suppress(FileNotFoundError):
        return _acceptance(ledger).read_bytes() == f"{first_slot}\n".encode()
    return False


def _spend_acceptance(ledger: Path) -> None:
    _acceptance(ledger).unlink(missing_ok=True)
    durable.sync(ledger.parent)


def _acceptance(ledger: Path) -> Path:
    return ledger.with_name(f"{ledger.name}.accepts-loss")


class Ledger(LedgerRows):
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
            except (sqlite3.Error, MalformedFactError) as error:
                raise _startup_error(path, error) from error
            opened.pop_all()
        return cls(connection, lock, path)

    def close(self) -> None:
        self._connection.close()
        self._lock.release()

    def balance(self) -> Balance:
        """See ``LedgerEngine``."""
        try:
            return self._read_balance()
        except MalformedFactError as error:
            raise damaged(f"the ledger {self._path}", error) from error
        except (sqlite3.Error, OSError) as error:
            raise RefusedError(
                Reason.DISK,
                f"the ledger cannot be read: {error}",
                fix=durable.disk_fix(error, disk=_DISK),
            ) from error

    def record(self, *transactions: Transaction) -> None:
        """Put transactions on disk, all of them or none, with one sync.

        Raises:
            RefusedError: DISK, where the disk is full or fails; nothing was changed.
        """
        try:
            if any(transaction.of(Generation) for transaction in transactions):
                _spend_acceptance(self._path)
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._write_all(transactions)
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
                fix=f"{durable.disk_fix(error, disk=_DISK)}; the same request may be sent again",
            ) from error

    def group(self, slot: int) -> EncodedGroup | None:
        """Return the group in the spool for ``slot``; None where there is none.

        Raises:
            RefusedError: DAMAGED, where the bytes are not those that were stored.
        """
        try:
            return self._read_group(slot)
        except sqlite3.DatabaseError as error:
            raise RefusedError(Reason.DAMAGED, f"the group of slot {slot} cannot be read: {error}") from error

    def _execute(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)

    def _execute_each(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        self._connection.executemany(statement, rows)

    def _is_loss_accepted(self, first_slot: int) -> bool:
        return is_loss_accepted(self._path, first_slot)


def _startup_error(path: Path, error: Exception) -> StartupError:
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
