"""Which coordinator of a run leads, where several share one database: a session for each of them.

    standing by --the lock is free--> a new epoch, older writers cut off --> leading --session lost--> deposed
        '-- its holder is silent for SILENT_S: its session is ended, which frees the lock

A session that ends, as with its process, frees the advisory lock at once. A leader that was stopped, or whose
machine vanished, keeps it. Each leader therefore asks for the epoch once a second; coordinators that stand by
look at the time of that question, which PostgreSQL keeps. The coordinators' clocks play no part.

Blocking: one thread at a time calls this.
"""

import hashlib
import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg

from node.coordinator.ledger.ledger_postgresql import (
    READ_ONLY,
    FencedConnection,
    PostgresqlLedger,
    connect,
    fix_of,
    prepare,
)
from node.coordinator.ledger.shared_records import SharedRecords
from node.enrolment.enrolment_ledger import EnrolmentLedger
from node.errors import DeposedError, StartupError

logger = logging.getLogger(__name__)

ASK_S: Final = 1.0
"""How often a leader asks whether it is one."""

SILENT_S: Final = 4.0
"""Silence after which a leader is taken for dead. A takeover then takes 5 s and reading the ledger."""

_HOLDER: Final = """
SELECT pid, extract(epoch FROM clock_timestamp() - coalesce(query_start, backend_start))::float8
FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND (classid::bigint << 32) | objid::bigint = %s
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


@dataclass(frozen=True, slots=True)
class Leader:
    epoch: int
    address: str
    """Where it listens, as it was configured."""


class Leadership:
    """One coordinator's session."""

    def __init__(self, url: str, *, run_id: str, address: str) -> None:
        """Connect. Raises StartupError: the database cannot be reached, or does not let us in."""
        self._url = url
        self._run_id = run_id
        self._address = address
        digest = hashlib.sha256(f"heterorl {run_id}".encode()).digest()
        self._lock = int.from_bytes(digest[:8], signed=True)
        self._ledger_name = f"heterorl-ledger-{digest[:8].hex()}"
        self._session: psycopg.Connection[Any] | None = self._connect()
        self._epoch = 0
        self._is_away = False
        self._closing = threading.Event()
        self._asking: threading.Thread | None = None
        self._opened = ExitStack()
        """Connections of the leader's."""

    def try_to_lead(self) -> bool:
        """Lead, unless another coordinator does; return whether this one leads now.

        Raises:
            StartupError: the database has another run's ledger, or other software's.
        """
        try:
            session = self._session = self._session or self._connect()
            self._is_away = False
            if session.execute("SELECT pg_try_advisory_lock(%s)", [self._lock]).fetchone() != (True,):
                self._end_if_silent(session)
                return False
            prepare(session, run_id=self._run_id)
            # A writer of an older epoch may hang in a transaction, and hold the row of the epoch.
            session.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name = %s AND datname = current_database()",
                [self._ledger_name],
            )
            found = session.execute(
                "UPDATE leadership SET epoch = epoch + 1, address = %s RETURNING epoch", [self._address]
            ).fetchone()
            assert found is not None, "prepare has made it"
            (self._epoch,) = found
            return True
        except psycopg.ProgrammingError as error:
            raise StartupError(
                f"the ledger's database refused: {' '.join(str(error).split())}",
                fix="Give the user of coordinator.ledger a database of its own.",
            ) from error
        except (psycopg.Error, StartupError) as error:
            if isinstance(error, StartupError) and self._session is not None:
                raise
            if not self._is_away:
                detail = " ".join(str(error).split())
                fix = fix_of(error) if isinstance(error, psycopg.Error) else error.fix
                is_there = getattr(error, "sqlstate", None) == READ_ONLY
                what = "the ledger's database is read-only" if is_there else "the ledger's database is away"
                logger.warning(what, extra={"detail": detail, "fix": fix})
            self._is_away = True
            self._drop_session()
            return False

    def leader(self) -> Leader | None:
        """Return who leads, as far as the database says; None: nobody has yet, or it is away."""
        if self._session is None:
            return None
        try:
            row = self._session.execute("SELECT epoch, address FROM leadership").fetchone()
        except psycopg.Error:  # also where the first leader is making the tables
            return None
        return None if row is None else Leader(*row)

    def open_ledger(self, *, on_lost: Callable[[DeposedError], None]) -> PostgresqlLedger:
        """Open the ledger, as the leader, and keep asking whether we are; called once.

        Args:
            on_lost: Called at least once, in any thread, when this coordinator leads no longer.
        Raises:
            StartupError: the database cannot be reached any more.
        """
        self._asking = threading.Thread(target=self._ask, args=(on_lost,), name="leadership", daemon=True)
        self._asking.start()
        return PostgresqlLedger(self._open_connection(on_lost))

    def open_records(self, issued: Path, *, on_lost: Callable[[DeposedError], None]) -> SharedRecords:
        """Open what coordinators share besides the ledger, and this one's file of tokens made here.

        See ``open_ledger``, which comes first: only then do the others hear that this one lives.
        """
        return SharedRecords(self._open_connection(on_lost), issued=EnrolmentLedger(issued))

    def close(self) -> None:
        """Close what was opened and end the session: another coordinator may lead at once."""
        self._closing.set()
        self._opened.close()
        if self._asking is not None:
            self._asking.join(timeout=ASK_S)
        self._drop_session()

    @property
    def epoch(self) -> int:
        return self._epoch

    def _ask(self, on_lost: Callable[[DeposedError], None]) -> None:
        session = self._session
        assert session is not None
        while not self._closing.wait(ASK_S):
            try:
                found = session.execute("SELECT epoch FROM leadership").fetchone()
            except psycopg.Error as error:
                if not self._closing.is_set():
                    on_lost(DeposedError(f"the session that holds the leadership ended: {error}"))
                return
            if found != (self._epoch,):
                on_lost(DeposedError(f"another coordinator leads, with epoch {found and found[0]}"))
                return

    def _end_if_silent(self, session: "psycopg.Connection[Any]") -> None:
        for pid, silent_s in session.execute(_HOLDER, [self._lock]).fetchall():
            if silent_s is None:  # PostgreSQL hides the sessions of other users
                raise StartupError(
                    "the leader uses the database as another user, so this coordinator could not replace it",
                    fix="Let all coordinators of the run use the same user of the database.",
                )
            if silent_s > SILENT_S:
                logger.warning(
                    "leader is silent; its session is ended", extra={"silent_s": round(silent_s, 1)}
                )
                session.execute("SELECT pg_terminate_backend(%s)", [pid])

    def _open_connection(self, on_lost: Callable[[DeposedError], None]) -> FencedConnection:
        connection = connect(self._url, name=self._ledger_name)
        self._opened.callback(connection.close)
        return FencedConnection(connection, epoch=self._epoch, on_lost=on_lost)

    def _connect(self) -> "psycopg.Connection[Any]":
        return connect(self._url, name="heterorl-coordinator")

    def _drop_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
