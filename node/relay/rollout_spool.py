"""Groups on a relay's disk, until the coordinator has answered for them.

One SQLite file (WAL, synchronous=FULL). SQLite keeps no checksum of what it stores, so each group carries its
own.

Blocking: one thread calls this, never the event loop's.
"""

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import xxhash

from node.errors import Reason, RefusedError, StartupError

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS groups (
    number INTEGER PRIMARY KEY AUTOINCREMENT, sampler_id TEXT NOT NULL, group_id TEXT NOT NULL,
    digest BLOB NOT NULL, data BLOB NOT NULL, UNIQUE (sampler_id, group_id)
) STRICT;
"""

_LOCK_TIMEOUT_S: Final = 1.0
"""Long enough for a predecessor that is closing the file; after it the start fails with a message."""


@dataclass(frozen=True, slots=True)
class SpooledGroup:
    """A group as it was submitted."""

    number: int
    """Counts up from 1; never used twice."""
    sampler_id: str
    group_id: str
    data: bytes | None
    """The SubmitRolloutsRequest to forward. None: the disk changed it."""


class RolloutSpool:
    """An open spool; nobody else can open it meanwhile."""

    def __init__(self, connection: sqlite3.Connection, *, capacity_groups: int, capacity_bytes: int) -> None:
        self._connection = connection
        self._capacity_groups = capacity_groups
        self._capacity_bytes = capacity_bytes
        size, size_bytes = connection.execute(
            "SELECT count(*), coalesce(sum(length(data)), 0) FROM groups"
        ).fetchone()
        self._size, self._bytes = int(size), int(size_bytes)

    @classmethod
    def open(cls, path: Path, *, capacity_groups: int, capacity_bytes: int) -> Self:
        """Open the spool; make it where there is none. Raises StartupError: it is damaged or locked."""
        try:
            connection = sqlite3.connect(
                path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(_SCHEMA)
            return cls(connection, capacity_groups=capacity_groups, capacity_bytes=capacity_bytes)
        except sqlite3.Error as error:
            raise StartupError(
                f"the rollout spool {path} cannot be opened: {error}",
                fix="Stop the relay that uses it; move a damaged file away: its groups are sampled again.",
            ) from error

    def close(self) -> None:
        self._connection.close()

    def __len__(self) -> int:
        """Return how many groups wait."""
        return self._size

    @property
    def size_bytes(self) -> int:
        """The size of the groups that wait."""
        return self._bytes

    @contextlib.contextmanager
    def one_commit(self) -> Iterator[None]:
        """Put all that the body does on disk with one sync, or nothing.

        Raises RefusedError: DISK, if it cannot be written; what the body raises.
        """
        before = self._size, self._bytes
        try:
            with _disk_refusals():
                self._connection.execute("BEGIN IMMEDIATE")
                yield
                self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self._size, self._bytes = before
            raise

    def put(self, sampler_id: str, group_id: str, data: bytes) -> bool:
        """Put a group on disk; False if it is there already.

        Raises RefusedError: BUSY, if the spool is full; DISK, if it cannot be written.
        """
        if self._size >= self._capacity_groups or self._bytes + len(data) > self._capacity_bytes:
            raise RefusedError(
                Reason.BUSY,
                f"{self._size} groups of {self._bytes} bytes wait for the coordinator, the spool is full",
                fix="try again later",
            )
        row = (sampler_id, group_id, xxhash.xxh3_128_digest(data), data)
        with _disk_refusals():
            done = self._connection.execute(
                "INSERT OR IGNORE INTO groups (sampler_id, group_id, digest, data) VALUES (?, ?, ?, ?)", row
            )
        self._size += done.rowcount
        self._bytes += done.rowcount * len(data)
        return done.rowcount == 1

    def oldest(self, limit: int, *, limit_bytes: int = 1 << 62) -> tuple[SpooledGroup, ...]:
        """Return the groups that have waited longest, one at least. Raises RefusedError: DISK."""
        rows, size_bytes = [], 0
        with _disk_refusals():
            for row in self._connection.execute("SELECT * FROM groups ORDER BY number LIMIT ?", [limit]):
                rows.append(row)
                size_bytes += len(row[-1])
                if size_bytes >= limit_bytes:
                    break
        return tuple(
            SpooledGroup(
                number, sampler_id, group_id, data if xxhash.xxh3_128_digest(data) == digest else None
            )
            for number, sampler_id, group_id, digest, data in rows
        )

    def remove(self, number: int) -> bool:
        """Forget a group; False if it is not there. Raises RefusedError: DISK, if that cannot be written."""
        with _disk_refusals():
            removed = self._connection.execute(
                "DELETE FROM groups WHERE number = ? RETURNING length(data)", [number]
            ).fetchall()
        self._size -= len(removed)
        self._bytes -= sum(size for (size,) in removed)
        return bool(removed)


@contextlib.contextmanager
def _disk_refusals() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise RefusedError(
            Reason.DISK,
            f"the rollout spool cannot be read or written: {error}",
            fix="make room on the disk of the relay's state directory",
        ) from error
