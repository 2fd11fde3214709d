"""Groups on a relay's disk, until the coordinator has answered for them.

One SQLite file (WAL, synchronous=FULL). SQLite keeps no checksum of what it stores, so each group carries its
own.

Blocking: one thread calls this, never the event loop's.
"""

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Self

import xxhash

from node import durable
from node.errors import Reason, RefusedError, StartupError
from node.rollout import EncodedGroup

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS groups (
    number INTEGER PRIMARY KEY AUTOINCREMENT, sampler_id TEXT NOT NULL, group_id TEXT NOT NULL,
    digest BLOB NOT NULL, header BLOB NOT NULL, columns BLOB NOT NULL, certificate BLOB NOT NULL,
    signature BLOB NOT NULL, UNIQUE (sampler_id, group_id)
) STRICT;
"""

_SIZE: Final = "length(header) + length(columns) + length(certificate) + length(signature)"

_LOCK_TIMEOUT_S: Final = 1.0
"""Long enough for a predecessor that is closing the file; after it the start fails with a message."""


class RolloutSpool:
    """An open spool; nobody else can open it meanwhile."""

    def __init__(self, connection: sqlite3.Connection, *, capacity_groups: int, capacity_bytes: int) -> None:
        self._connection = connection
        self._capacity_groups = capacity_groups
        self._capacity_bytes = capacity_bytes
        size, size_bytes = connection.execute(
            f"SELECT count(*), coalesce(sum({_SIZE}), 0) FROM groups"
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

    def put(self, group: EncodedGroup) -> bool:
        """Put a group on disk; False if it is there already.

        Raises RefusedError: BUSY, if the spool is full; DISK, if it cannot be written.
        """
        parts = group.header, group.columns, group.certificate, group.signature
        size_bytes = sum(map(len, parts))
        if self._size >= self._capacity_groups or self._bytes + size_bytes > self._capacity_bytes:
            raise RefusedError(
                Reason.BUSY,
                f"{self._size} groups of {self._bytes} bytes wait for the coordinator, the spool is full",
                fix="try again later",
            )
        row = (None, group.sampler_id, group.group_id, _digest(parts), *parts)
        with _disk_refusals():
            done = self._connection.execute(
                "INSERT OR IGNORE INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row
            )
        self._size += done.rowcount
        self._bytes += done.rowcount * size_bytes
        return done.rowcount == 1

    def oldest(self, limit: int, *, limit_bytes: int = 1 << 62) -> dict[int, EncodedGroup | RefusedError]:
        """Return the groups that have waited longest, one at least, by number, oldest first.

        A number counts up from 1 and is never used twice. DAMAGED in place of a group that the disk changed.

        Raises RefusedError: DISK.
        """
        waiting: dict[int, EncodedGroup | RefusedError] = {}
        size_bytes = 0
        with _disk_refusals():
            rows = self._connection.execute("SELECT * FROM groups ORDER BY number LIMIT ?", [limit])
            for number, sampler_id, group_id, digest, *parts in rows:
                header, columns, *proof = parts
                waiting[number] = EncodedGroup(header, columns, group_id, sampler_id, *proof)
                if _digest(parts) != digest:
                    what = f"group {group_id} of {sampler_id} is not what was stored"
                    waiting[number] = RefusedError(Reason.DAMAGED, what)
                size_bytes += sum(map(len, parts))
                if size_bytes >= limit_bytes:
                    break
        return waiting

    def remove(self, number: int) -> bool:
        """Forget a group; False if it is not there. Raises RefusedError: DISK, if that cannot be written."""
        with _disk_refusals():
            removed = self._connection.execute(
                f"DELETE FROM groups WHERE number = ? RETURNING {_SIZE}", [number]
            ).fetchall()
        self._size -= len(removed)
        self._bytes -= sum(size for (size,) in removed)
        return bool(removed)


def _digest(parts: Iterable[bytes]) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()


@contextlib.contextmanager
def _disk_refusals() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise RefusedError(
            Reason.DISK,
            f"the rollout spool cannot be read or written: {error}",
            fix=durable.disk_fix(error, disk="the disk of the relay's state directory"),
        ) from error
