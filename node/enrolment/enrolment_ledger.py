"""The coordinator's record of enrolments: tokens spent, and node ids given out.

SQLite, synchronous=FULL: a token is spent on disk before the coordinator answers, so that no crash makes it
good for two peers. Coordinators that share a database keep it there (``coordinator.ledger.shared_records``).
"""

import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from node.enrolment.init_run import INITIAL_ROLES
from node.enrolment.tokens import Token
from node.errors import Reason, RefusedError

FILE_NAME: Final = "enrolments.sqlite"

REMEMBERED_TOKENS: Final = 65_536
"""Spent tokens kept beyond their expiry, 10 MB. A token that expired only because a clock was ahead for a
minute must not be good again once it is set back."""

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS spent (
    nonce TEXT PRIMARY KEY, expires_at_s REAL NOT NULL, node_id TEXT NOT NULL, key_digest BLOB NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS members (node_id TEXT PRIMARY KEY, role TEXT NOT NULL) STRICT;
"""


def known_members(path: Path) -> frozenset[str] | None:
    """Return every node id ever given out; None where that cannot be known. The coordinator may run."""
    if not path.exists():
        return None
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            return frozenset(name for (name,) in database.execute("SELECT node_id FROM members"))
    except sqlite3.Error:
        return None  # Busy or damaged: no reason to refuse a revocation.


class EnrolmentLedger:
    """Spent tokens, the newest beyond their expiry, and every node id given out. One caller at a time."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.executescript(_SCHEMA)
        self._admit_initial()

    def close(self) -> None:
        self._database.close()

    def _begin(self) -> None:
        self._execute("BEGIN IMMEDIATE")

    def _execute(self, statement: str, values: Sequence[Any] = ()) -> Any:
        return self._database.execute(statement, values)

    def spend(self, token: Token, *, node_id: str, key_digest: bytes, now: float) -> None:
        """Spend a token for one peer, durably; accept it again from the same peer.

        Same token, same node id and same key mean a retry after a lost answer.

        Raises RefusedError: TOKEN_REFUSED; spent by another, or the node id is somebody's.
        """
        self._begin()
        try:
            self._forget_oldest(now)
            if not self._is_retry(token, node_id, key_digest):
                self._admit(token, node_id, key_digest)
        except BaseException:
            self._execute("ROLLBACK")
            raise
        self._execute("COMMIT")

    def _admit_initial(self) -> None:
        for role in INITIAL_ROLES:
            self._execute("INSERT INTO members VALUES (?, ?) ON CONFLICT DO NOTHING", (role, role))

    def _forget_oldest(self, now: float) -> None:
        self._execute(
            "DELETE FROM spent WHERE expires_at_s <= ? AND rowid IN "
            "(SELECT rowid FROM spent ORDER BY rowid DESC LIMIT 9223372036854775807 OFFSET ?)",
            (now, REMEMBERED_TOKENS),
        )

    def _is_retry(self, token: Token, node_id: str, key_digest: bytes) -> bool:
        spent = self._execute(
            "SELECT node_id, key_digest FROM spent WHERE nonce = ?", (token.nonce,)
        ).fetchone()
        if spent is not None and spent != (node_id, key_digest):
            raise RefusedError(
                Reason.TOKEN_REFUSED, "the token was used before", fix="ask the operator for a new token"
            )
        return spent is not None

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
            "INSERT INTO spent VALUES (?, ?, ?, ?)", (token.nonce, token.expires_at_s, node_id, key_digest)
        )
        self._execute(
            "INSERT INTO members VALUES (?, ?) ON CONFLICT (node_id) DO UPDATE SET role = excluded.role",
            (node_id, token.role),
        )
