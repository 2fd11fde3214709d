"""The records that coordinators of a run share besides the ledger: spent tokens, members.

Without TLS none of it is used. The leader writes it, under its epoch as the ledger.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from node.coordinator.ledger.ledger_postgresql import FencedConnection, marked
from node.enrolment.enrolment_ledger import EnrolmentLedger
from node.enrolment.tokens import Token

_TABLES: Final = """
CREATE TABLE IF NOT EXISTS uses (
    nonce TEXT NOT NULL, expires_at_s DOUBLE PRECISION NOT NULL, node_id TEXT NOT NULL,
    key_digest BYTEA NOT NULL, rowid BIGINT GENERATED ALWAYS AS IDENTITY, PRIMARY KEY (nonce, key_digest)
);
CREATE TABLE IF NOT EXISTS members (node_id TEXT PRIMARY KEY, role TEXT NOT NULL);
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

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._fenced.writing():
            yield

    def _execute(self, statement: str, values: Sequence[Any] = ()) -> Any:
        return self._connection.execute(marked(statement), values)
