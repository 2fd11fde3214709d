"""The records that coordinators of a run share besides the ledger: spent tokens, members, who is shut out.

Without TLS none of it is used. The leader writes it, under its epoch as the ledger. Its own list of revoked
nodes is a file as always: what it says is written here whenever it changes, and a new leader adds to its own
file what it finds here. A node is therefore let in again only where the leader's operator says so.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from node.coordinator.ledger.ledger_postgresql import FencedConnection, marked
from node.enrolment.enrolment_ledger import EnrolmentLedger
from node.enrolment.tokens import Token
from node.errors import StartupError
from node.identity.files import write_public
from node.identity.revocation import with_nodes

_TABLES: Final = """
CREATE TABLE IF NOT EXISTS uses (
    nonce TEXT NOT NULL, expires_at_s DOUBLE PRECISION NOT NULL, node_id TEXT NOT NULL,
    key_digest BYTEA NOT NULL, rowid BIGINT GENERATED ALWAYS AS IDENTITY, PRIMARY KEY (nonce, key_digest)
);
CREATE TABLE IF NOT EXISTS members (node_id TEXT PRIMARY KEY, role TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS revoked (node_id TEXT PRIMARY KEY);
"""


class SharedRecords(EnrolmentLedger):
    """The leader's connection to them. Any thread; one call at a time."""

    _remembered = ("uses",)

    def __init__(self, fenced: FencedConnection, *, issued: EnrolmentLedger) -> None:
        """Use a connection; ``issued`` has the tokens that were made and cancelled on this machine."""
        self._fenced = fenced
        self._connection = fenced.connection
        self._issued = issued
        self._turn = threading.Lock()
        with fenced.writing():
            self._connection.execute(_TABLES)
            self._admit_initial()

    def close(self) -> None:
        self._connection.close()
        self._issued.close()

    def is_cancelled(self, token: Token) -> bool:
        return self._issued.is_cancelled(token)

    def spend(self, *arguments: Any, **named: Any) -> None:
        """See ``EnrolmentLedger``. Raises RefusedError: as ``FencedConnection.errors_told``, too."""
        with self._turn:
            super().spend(*arguments, **named)

    def revoke(self, node_ids: frozenset[str]) -> None:
        """Put down who is shut out now. Raises RefusedError: as ``FencedConnection.errors_told``."""
        with self._turn, self._fenced.writing():
            self._connection.execute("DELETE FROM revoked")
            self._connection.cursor().executemany(
                "INSERT INTO revoked VALUES (%s)", [(node_id,) for node_id in sorted(node_ids)]
            )

    def add_revoked_to(self, path: Path) -> None:
        """Shut out, in this coordinator's file, whomever the leader before it did.

        Raises:
            StartupError: the file cannot be read or written.
            RefusedError: as ``FencedConnection.errors_told``.
        """
        with self._fenced.errors_told():
            names = [name for (name,) in self._connection.execute("SELECT node_id FROM revoked")]
        try:
            text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
            if (longer := with_nodes(text, names, remark="by the coordinator that led before")) != text:
                write_public(path, longer.encode())
        except OSError as error:
            raise StartupError(
                f"{path} cannot be read or written: {error.strerror}", fix="Check its owner and the disk."
            ) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._fenced.writing():
            yield

    def _execute(self, statement: str, values: Sequence[Any] = ()) -> Any:
        return self._connection.execute(marked(statement), values)
