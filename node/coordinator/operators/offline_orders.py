"""Orders that are given while no coordinator runs: the command holds the ledger, and records them.

The next coordinator carries out what they change at once. What they mean for as long as they hold is so from
its first answer on.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from node.coordinator.ledger.ledger_file import FILE_NAME, Ledger, lock_of
from node.coordinator.ledger.ledger_rows import LedgerEngine
from node.coordinator.operators.older_orders import older_orders, set_aside
from node.coordinator.work.balance import Transaction
from node.coordinator.work.orders.order_decisions import decided, new_ones
from node.coordinator.work.orders.orders import Orders
from node.errors import COMMAND_LINE, Reason, RefusedError, StartupError
from node.process.last_start import FILE_NAME as LAST_START
from node.system.extras import NeededPackage
from node.system.file_lock import FileLock
from node.values.operator_order import Order

if TYPE_CHECKING:
    from node.errors import DeposedError

_DATABASE_KEY: Final = "coordinator.ledger"


class OfflineDesk:
    """Gives orders to a run whose ledger this process holds."""

    def __init__(self, ledger: LedgerEngine, known: Orders) -> None:
        self._ledger = ledger
        self._known = known

    def give(self, asked: Sequence[Order], *, again: bool) -> tuple[Order, ...]:
        """Record orders; return them as they stand. Raises RefusedError: see ``decided``; DISK."""
        stand = decided(self._known, asked, again=again, now=time.time())
        if fresh := new_ones(stand, asked):
            self._ledger.record(Transaction(facts=fresh))
        return stand

    def listed(self, verb: str) -> tuple[Order, ...]:
        return self._known.listed(verb)


@contextmanager
def offline_desk(state_dir: Path, *, run_id: str, database: str | None) -> Iterator[OfflineDesk]:
    """Hold a run's ledger while the body runs.

    Args:
        state_dir: the coordinator's.
        database: the URL of the PostgreSQL database with the ledger; None: as at the last start.
    Raises:
        StartupError: a coordinator has it, or it cannot be opened.
        RefusedError: STANDBY; another coordinator leads. DISK, DAMAGED: see ``LedgerEngine.balance``.
    """
    with contextlib.ExitStack() as opened:
        ledger: LedgerEngine
        if (url := database or _database_of_last_start(state_dir)) is None:
            ledger = opened.enter_context(_file(state_dir / FILE_NAME, run_id=run_id))
        else:
            ledger = opened.enter_context(_led_database(url, run_id=run_id))
        known = Orders(ledger.balance().of(Order))
        if older := older_orders(state_dir, known):
            ledger.record(Transaction(facts=older))
            for order in older:
                known.apply(order)
        set_aside(state_dir)
        yield OfflineDesk(ledger, known)


@contextmanager
def _file(path: Path, *, run_id: str) -> Iterator[LedgerEngine]:
    FileLock.take(
        lock_of(path),
        of=f"The ledger {path}",
        fix="It is a coordinator that takes no orders yet: try again in a moment. One of 0.3 takes none.",
    ).release()
    with closing(Ledger.open(path, run_id=run_id)) as ledger:
        if os.geteuid() == 0:  # an operator's: the coordinator, another user, is to write it too
            owner = path.parent.stat()
            for made in path.parent.glob(f"{path.name}*"):
                os.chown(made, owner.st_uid, owner.st_gid)
        yield ledger


@contextmanager
def _led_database(url: str, *, run_id: str) -> Iterator[LedgerEngine]:
    NeededPackage("ledger", "--database", "psycopg", "postgresql", source=COMMAND_LINE).check()
    from node.coordinator.ledger.leadership import Leadership

    def lost(error: "DeposedError") -> None:
        """The refusal of what is written next says it."""

    with closing(Leadership(url, run_id=run_id, address="")) as leadership:
        if not leadership.try_to_lead():
            leader = leadership.leader()
            where = "another coordinator leads" if leader is None else f"the one at {leader.address} leads"
            raise RefusedError(Reason.STANDBY, where, fix="give the order where that one runs")
        with closing(leadership.open_ledger(on_lost=lost)) as ledger:
            yield ledger


def _database_of_last_start(state_dir: Path) -> str | None:
    """Return the URL that the last start had; None: none. Raises StartupError: one that is not kept."""
    try:
        settings = json.loads((state_dir / LAST_START).read_bytes())
    except (OSError, ValueError):
        return None  # never started here
    if _DATABASE_KEY not in settings:  # an address with a user in it is not kept
        raise StartupError(
            f"no coordinator answers in {state_dir}, and the run's ledger is in a database",
            fix="Start the coordinator, or name the database with --database, as coordinator.ledger has it.",
        )
    url: str | None = settings[_DATABASE_KEY]
    return url
