"""The journal on disk: rows in SQLite, one transaction for each step.

    <state>/journal.sqlite    see ``entry_rows``; `written` has the number of the newest entry

A transaction is there whole or not at all, and on disk when it returns (rollback journal, synchronous=FULL).
It is written once, where it stays: a write-ahead log would write each group twice, and lose entries silently
behind a bit that flips in it. Entries that no checkpoint needs are deleted, and their pages used again.

Blocking, and not thread-safe: one thread at a time.
"""

import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from learner.journal.entry_rows import DamagedJournalError, EntryRow, Origin
from learner.journal.progress import Entry, Progress
from learner.journal.restart import JournalPlace, JournalRecord, RestartPlan, first_needed, plan_restart
from node.errors import Reason, RefusedError, StartupError
from node.system import durable
from node.values.groups.rollout import EncodedGroup
from node.values.policy import PolicyVersion

FILE: Final = "journal.sqlite"
"""In a learner's state directory."""

_SEGMENTS: Final = "journal"
"""Directory of the journal of release 0.3 and before."""

_SCHEMA_VERSION: Final = 1
_SCHEMA: Final = """
CREATE TABLE origin (run_id TEXT NOT NULL, layout_digest TEXT NOT NULL, base_root TEXT NOT NULL);
CREATE TABLE written (newest INTEGER NOT NULL);
CREATE TABLE entries (
    number INTEGER PRIMARY KEY, text TEXT NOT NULL, random_state BLOB NOT NULL, group_digests BLOB NOT NULL,
    digest BLOB NOT NULL, bytes INTEGER NOT NULL
);
CREATE TABLE groups (
    entry INTEGER NOT NULL, place INTEGER NOT NULL, header BLOB NOT NULL, columns BLOB NOT NULL
);
CREATE INDEX groups_of_entry ON groups (entry, place);
"""
_PAGE_BYTES: Final = 1 << 14
"""A group has some 100 kB, in a chain of pages."""

_OF_DISK: Final = ("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_BUSY")
"""Beginnings of the names of errors that pass."""

_BUSY_S: Final = 30.0
"""Longest wait for a command that reads the journal, which takes milliseconds."""


class StepJournal:
    """Appends entries, and forgets those that checkpoints have made worthless."""

    def __init__(self, directory: Path, *, origin: Origin, place: JournalPlace, since: JournalPlace) -> None:
        """Go on at ``place``, behind all entries that are there; make the file where there is none.

        Args:
            directory: the learner's state.
            since: place of the newest checkpoint.
        Raises:
            StartupError: the file cannot be made or read.
        """
        self._path = directory / FILE
        self._place = place
        self._new_since = since.next_entry
        durable.make_directory(directory)
        with _readable(self._path):
            if not self._path.exists():
                _make(self._path, origin)
            with _opened(self._path) as connection:
                self._sizes = dict(connection.execute("SELECT number, bytes FROM entries"))

    @property
    def size_bytes(self) -> int:
        """Size of all entries."""
        return sum(self._sizes.values())

    @property
    def new_bytes(self) -> int:
        """Size of the entries since ``roll``, or since the newest checkpoint."""
        return sum(size for number, size in self._sizes.items() if number >= self._new_since)

    def append(self, entry: Entry, *, random_state: bytes = b"", groups: Sequence[EncodedGroup] = ()) -> None:
        """Write an entry; durable on return.

        Args:
            random_state: before the step; nothing with news, and so are groups.
        Raises:
            RefusedError: DISK, where the disk is full or failing; the entry is not there, write it again.
            OSError: the file is gone.
        """
        number, previous = self._place.next_entry, bytes.fromhex(self._place.digest)
        row = EntryRow.of(entry, number=number, previous=previous, random_state=random_state, groups=groups)
        size = len(row.text) + len(random_state) + sum(len(one.header) + len(one.columns) for one in groups)
        told = (number, row.text, random_state, row.group_digests, row.digest, size)
        with _writing(self._path) as connection:
            connection.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?)", told)
            connection.executemany(
                "INSERT INTO groups VALUES (?, ?, ?, ?)",
                ((number, place, one.header, one.columns) for place, one in enumerate(groups)),
            )
            connection.execute("UPDATE written SET newest = ?", (number,))
        self._sizes[number] = size
        self._place = JournalPlace(number + 1, row.digest.hex())

    def roll(self) -> JournalPlace:
        """Count new bytes from here on; return the place of all that came before."""
        self._new_since = self._place.next_entry
        return self._place

    def cut(self, places: Sequence[JournalPlace]) -> None:
        """Remove what no checkpoint needs, given the places of those that are kept."""
        needed = first_needed(places)
        if not any(number < needed for number in self._sizes):
            return
        with suppress(RefusedError, OSError):  # the next cut tries again
            with _writing(self._path) as connection:
                connection.execute("DELETE FROM entries WHERE number < ?", (needed,))
                connection.execute("DELETE FROM groups WHERE entry < ?", (needed,))
            self._sizes = {number: size for number, size in self._sizes.items() if number >= needed}
            shutil.rmtree(self._path.with_name(_SEGMENTS), ignore_errors=True)


def read_journal(
    directory: Path,
    start: Progress,
    place: JournalPlace,
    *,
    origin: Origin | None,
    published: PolicyVersion | None,
) -> RestartPlan:
    """Return the way from a checkpoint to where the learner stopped; groups are read one step at a time.

    Args:
        directory: the learner's state.
        start: the checkpoint's; version 0 where there is none.
        place: where the journal was when the checkpoint's copy was made.
        origin: the run and the model that the journal must be of; None: any.
        published: the newest version in the learner's own store.
    Raises:
        StartupError: the journal is damaged, of another run, or incomplete; names file, entry and fix.
    """
    _check_segments(directory / _SEGMENTS, place)
    path = directory / FILE
    rows, newest = list[EntryRow](), 0
    with _readable(path):
        if path.exists():
            with _opened(path) as connection:
                connection.execute("BEGIN")  # one moment of a journal that is being written
                [own] = connection.execute("SELECT run_id, layout_digest, base_root FROM origin")
                if origin is not None and (difference := origin.difference(Origin(*own))):
                    raise DamagedJournalError(f"it is of another run or model: {difference}")
                [(newest,)] = connection.execute("SELECT newest FROM written")
                found = connection.execute(
                    "SELECT number, text, random_state, group_digests, digest FROM entries "
                    "WHERE number >= ? ORDER BY number",
                    (place.next_entry,),
                )
                rows = [EntryRow(*row) for row in found]
        return plan_restart(start, place, rows, newest=newest, published=published)


def groups_of(directory: Path, record: JournalRecord) -> list[EncodedGroup]:
    """Read the groups of a step, in order.

    Raises:
        StartupError: they are not what was written, or cannot be read.
    """
    path = directory / FILE
    with _readable(path), _opened(path) as connection:
        found = connection.execute(
            "SELECT header, columns FROM groups WHERE entry = ? ORDER BY place", (record.row.number,)
        )
        groups = [EncodedGroup(bytes(header), bytes(columns)) for header, columns in found]
        record.row.check_groups(groups)
    return groups


def _make(path: Path, origin: Origin) -> None:
    """Make an empty journal: under its name once it is whole."""
    staged = path.with_name(f".{path.name}.new")
    staged.unlink(missing_ok=True)
    with closing(_connected(staged, mode="rwc")) as connection:
        connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = OFF")
        connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_SCHEMA_VERSION}; COMMIT;")
        connection.execute("INSERT INTO origin VALUES (?, ?, ?)", tuple(asdict(origin).values()))
        connection.execute("INSERT INTO written VALUES (0)")
    durable.sync(staged)
    durable.rename(staged, path)


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection for one use: none is kept, so that a file which is gone is noticed."""
    path.stat()
    with closing(_connected(path, mode="rw")) as connection:
        [(version,)] = connection.execute("PRAGMA user_version")
        if version != _SCHEMA_VERSION:
            raise DamagedJournalError(f"it has format {version}, and {_SCHEMA_VERSION} is what can be read")
        connection.execute("PRAGMA journal_mode = TRUNCATE")
        connection.execute("PRAGMA synchronous = FULL")
        yield connection


def _connected(path: Path, *, mode: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None)


@contextmanager
def _writing(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection with a transaction, which is committed at the end.

    Raises:
        RefusedError: DISK, where there may be room again; nothing was written.
        OSError: the file is gone.
        StartupError: the file is damaged.
    """
    try:
        with _opened(path) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
    except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
        raise  # our mistake, not the disk's
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        if not name.startswith(_OF_DISK):
            raise _unusable(path, str(error)) from error
        fix = durable.disk_fix(error, disk="the disk of the state directory")
        if name.startswith("SQLITE_BUSY"):
            fix = "let the program that reads it finish"
        raise RefusedError(Reason.DISK, f"{path} could not be written: {error}", fix=fix) from error


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise what keeps a journal from being read as an error that says what to do."""
    try:
        yield
    except (DamagedJournalError, sqlite3.Error, OSError, TypeError, ValueError) as error:
        raise _unusable(path, str(error)) from error


def _check_segments(directory: Path, place: JournalPlace) -> None:
    """Check that the journal of an older release has no step since its last checkpoint."""
    numbers = (path.stem for path in directory.glob("*.segment"))
    behind = [int(number) for number in numbers if number.isdecimal() and int(number) >= place.next_segment]
    is_older = place.next_segment > 0 or place == JournalPlace()
    if behind and is_older and not directory.with_name(FILE).exists():
        raise StartupError(
            f"{directory} has steps that release 0.3 took since its checkpoint, in segment {min(behind)}",
            fix="Start release 0.3 once more and stop it (SIGTERM): it writes a checkpoint then.",
        )


def _unusable(path: Path, what: str) -> StartupError:
    return StartupError(
        f"journal {path} cannot be used: {what}",
        fix="Restore journal, checkpoints and published of the learner's state directory from one copy. "
        "Without one, export the newest version (`heterorl-node export`) and begin a new run with it: steps "
        "that others were told of cannot be taken with other groups.",
    )
