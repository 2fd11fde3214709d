"""The coordinator's record of enrolments: tokens made, spent and cancelled, and node ids given out.

SQLite, synchronous=FULL: a token is spent on disk before the coordinator answers, so that no crash makes it
good for one peer too many. `heterorl-node token` writes the same file, while the coordinator runs or before.
Coordinators that share a database keep it there (``coordinator.ledger.shared_records``).
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from node.enrolment.init_run import INITIAL_ROLES
from node.enrolment.tokens import NUMBER_CHARACTERS, Token
from node.errors import Reason, RefusedError
from node.values.roles import Role

FILE_NAME: Final = "enrolments.sqlite"

REMEMBERED_TOKENS: Final = 65_536
"""Spent tokens kept beyond their expiry, 10 MB. A token that expired only because a clock was ahead for a
minute must not be good again once it is set back."""

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS spent (
    nonce TEXT PRIMARY KEY, expires_at_s REAL NOT NULL, node_id TEXT NOT NULL, key_digest BLOB NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS uses (
    nonce TEXT NOT NULL, expires_at_s REAL NOT NULL, node_id TEXT NOT NULL, key_digest BLOB NOT NULL,
    PRIMARY KEY (nonce, key_digest)
) STRICT;
INSERT OR IGNORE INTO uses SELECT * FROM spent;
DELETE FROM spent;
CREATE TABLE IF NOT EXISTS issued (
    nonce TEXT PRIMARY KEY, expires_at_s REAL NOT NULL, role TEXT NOT NULL, node_id TEXT,
    uses INTEGER NOT NULL, is_cancelled INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE IF NOT EXISTS members (node_id TEXT PRIMARY KEY, role TEXT NOT NULL) STRICT;
"""
"""``spent`` is where ledgers were kept while every token was for one peer."""

_INCOMPLETE: Final = 1
"""``user_version`` of a file beside which a database has uses and members of the run."""


@dataclass(frozen=True, slots=True)
class IssuedToken:
    """A token that was made here, without its secret."""

    number: str
    role: str
    node_id: str | None
    """The only one it admits; None: any."""
    uses: int
    used_by: tuple[str, ...]
    """Node ids."""
    expires_at_s: float
    is_cancelled: bool


def known_members(path: Path) -> dict[str, Role] | None:
    """Return every node id ever given out, and its role; None where this file cannot tell.

    The coordinator may run.
    """
    if not path.exists():
        return None
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            if _is_incomplete(database):
                return None
            return {name: Role(role) for name, role in database.execute("SELECT node_id, role FROM members")}
    except (sqlite3.Error, ValueError):
        return None  # Busy or damaged: no reason to refuse a revocation.


def note_incomplete(path: Path) -> None:
    """Note that from now on a database has what peers make of tokens, and this file what operators do."""
    with contextlib.closing(EnrolmentLedger(path)) as ledger:
        ledger._execute(f"PRAGMA user_version = {_INCOMPLETE}")


def _is_incomplete(database: sqlite3.Connection) -> bool:
    return bool(database.execute("PRAGMA user_version").fetchone() == (_INCOMPLETE,))


class EnrolmentLedger:
    """Tokens, the newest beyond their expiry, and every node id given out. One caller at a time."""

    _remembered: ClassVar[tuple[str, ...]] = ("uses", "issued")
    """Tables of tokens, whose oldest expired rows are forgotten."""

    def __init__(self, path: Path) -> None:
        is_new = not path.exists()
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.executescript(_SCHEMA)
        self._admit_initial()
        if is_new and os.geteuid() == 0:  # an operator's: the coordinator, another user, is to write it too
            owner = path.parent.stat()
            os.chown(path, owner.st_uid, owner.st_gid)

    def close(self) -> None:
        self._database.close()

    @property
    def is_incomplete(self) -> bool:
        """Whether a database has uses and members besides."""
        return _is_incomplete(self._database)

    def note_issued(self, token: Token) -> None:
        """Note a token that was made, for ``issued`` and ``cancel``."""
        values = (token.nonce, token.expires_at_s, token.role, token.node_id, token.uses)
        self._database.execute(
            "INSERT INTO issued (nonce, expires_at_s, role, node_id, uses) VALUES (?, ?, ?, ?, ?)", values
        )

    def issued(self) -> tuple[IssuedToken, ...]:
        """Return the tokens that were made here, the newest last."""
        rows = self._database.execute(
            "SELECT nonce, role, node_id, uses, expires_at_s, is_cancelled FROM issued ORDER BY rowid"
        )
        return tuple(
            IssuedToken(
                number=nonce[:NUMBER_CHARACTERS],
                role=role,
                node_id=node_id,
                uses=uses,
                used_by=tuple(self._users(nonce).values()),
                expires_at_s=expires_at_s,
                is_cancelled=bool(is_cancelled),
            )
            for nonce, role, node_id, uses, expires_at_s, is_cancelled in rows.fetchall()
        )

    def cancel(self, number: str) -> bool:
        """Let nobody else in with a token, from the next call on; return whether there is such a token."""
        cancelled = self._database.execute(
            "UPDATE issued SET is_cancelled = 1 WHERE substr(nonce, 1, ?) = ?", (NUMBER_CHARACTERS, number)
        )
        return cancelled.rowcount > 0

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    def _execute(self, statement: str, values: Sequence[Any] = ()) -> Any:
        return self._database.execute(statement, values)

    def spend(self, token: Token, *, node_id: str, key_digest: bytes, now: float) -> None:
        """Spend a use of a token for one peer, durably; accept it again from the same peer.

        Same token, same node id and same key mean a retry after a lost answer.

        Raises RefusedError: TOKEN_REFUSED; spent by others, cancelled, or the node id is somebody's.
        """
        with self._transaction():
            self._forget_oldest(now)
            if not self._is_retry(token, node_id, key_digest):
                self._admit(token, node_id, key_digest)

    def _admit_initial(self) -> None:
        for role in INITIAL_ROLES:
            self._execute("INSERT INTO members VALUES (?, ?) ON CONFLICT DO NOTHING", (role, role))

    def _forget_oldest(self, now: float) -> None:
        for table in self._remembered:
            self._execute(
                f"DELETE FROM {table} WHERE expires_at_s <= ? AND rowid IN "
                f"(SELECT rowid FROM {table} ORDER BY rowid DESC LIMIT 9223372036854775807 OFFSET ?)",
                (now, REMEMBERED_TOKENS),
            )

    def _users(self, nonce: str) -> dict[bytes, str]:
        """Return the digests of the keys that a token let in -> their node ids."""
        users = self._execute("SELECT key_digest, node_id FROM uses WHERE nonce = ?", (nonce,))
        return dict(users.fetchall())

    def _is_retry(self, token: Token, node_id: str, key_digest: bytes) -> bool:
        users = self._users(token.nonce)
        if users.get(key_digest) == node_id:
            return True
        what = ""
        if self.is_cancelled(token):
            what = "the token was cancelled"
        elif key_digest in users or len(users) >= token.uses:
            what = "the token was used before" + (f", by {len(users)} peers" if token.uses > 1 else "")
        if what:
            raise RefusedError(Reason.TOKEN_REFUSED, what, fix="ask the operator for a new token")
        return False

    def is_cancelled(self, token: Token) -> bool:
        """Return whether a token that was made here was cancelled."""
        asked = self._execute("SELECT is_cancelled FROM issued WHERE nonce = ?", (token.nonce,))
        return bool(asked.fetchone() == (1,))

    def _admit(self, token: Token, node_id: str, key_digest: bytes) -> None:
        # A token for any node must not let its holder become somebody who is already here;
        # a token that names the node is the operator's word that the same peer comes back.
        member = self._execute("SELECT 1 FROM members WHERE node_id = ?", (node_id,)).fetchone()
        if member is not None and token.node_id is None:
            raise RefusedError(
                Reason.TOKEN_REFUSED,
                f"there is a node {node_id} in this run",
                fix=f"choose another node.node_id, or ask for a token made with --node-id {node_id}",
            )
        self._execute(
            "INSERT INTO uses VALUES (?, ?, ?, ?)", (token.nonce, token.expires_at_s, node_id, key_digest)
        )
        self._execute(
            "INSERT INTO members VALUES (?, ?) ON CONFLICT (node_id) DO UPDATE SET role = excluded.role",
            (node_id, token.role),
        )
