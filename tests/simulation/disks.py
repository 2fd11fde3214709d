"""The disks of coordinator and relay: real SQLite files that fail, are slow, and are found after a death.

A death keeps the files as they are at that instant, by a copy that the next life opens. A power cut within a
commit keeps the log up to the last sync for certain, and of what follows any part.
"""

import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.work.balance import Balance, Transaction
from simulation.faults import FaultKind

FAILING_S = 1.5


class DiedError(Exception):
    """The process is gone; what it was doing reaches nobody."""


class SimulatedDisk:
    """The disk of one peer, over all its lives."""

    def __init__(self, directory: Path, draw: random.Random, *, files: tuple[str, ...]) -> None:
        self._root = directory
        self.draw = draw
        self._files = files
        self._copies = 0
        self.directory = directory / "0"
        self.directory.mkdir(parents=True)
        self.is_full = False
        self.fails_now_and_then = False
        self.slowness_s = 0.0
        self.death: FaultKind | None = None
        """How the process is to die in its next commit."""
        self.on_death: Callable[[str], None] = lambda _: None
        self.before: Balance | None = None
        """Content of the file before the commit that a death cut short; ``after``: had it been whole."""
        self.after: Balance | None = None

    def latency_s(self) -> float:
        """Return how long the next write takes; a disk that fails takes its time before it says so."""
        slowness_s = max(self.slowness_s, FAILING_S if self.is_full or self.fails_now_and_then else 0.0)
        return 0.002 + (self.draw.random() * slowness_s if slowness_s else 0.0)

    def run(self, work: Callable[[], Any]) -> Any:
        return work()

    def fails(self) -> bool:
        return self.is_full or (self.fails_now_and_then and self.draw.random() < 0.5)

    def keep(self, *, torn_from: int | None = None) -> None:
        """Keep the files as they are for the next life; ``torn_from``: up to there the log was synced."""
        self._copies += 1
        target = self._root / str(self._copies)
        target.mkdir()
        for name in self._files:
            for suffix in ("", "-wal"):
                source = self.directory / f"{name}{suffix}"
                if source.exists():
                    shutil.copyfile(source, target / source.name)
                    if suffix and torn_from is not None:
                        self._tear(target / source.name, torn_from)
        self.directory = target

    def _tear(self, log: Path, synced: int) -> None:
        size = log.stat().st_size
        if size <= synced:
            return
        kept = self.draw.randrange(synced, size + 1)
        with log.open("r+b") as file:
            file.truncate(kept)
            if kept > synced and self.draw.random() < 0.5:  # a sector that was allocated and never written
                file.seek(self.draw.randrange(synced, kept))
                file.write(bytes(min(512, kept - synced)))


class SimulatedLedger(Ledger):
    """The ledger on a simulated disk: a commit fails or ends in a death, between any two rows."""

    disk: SimulatedDisk
    _death: FaultKind | None = None
    _rows = 0
    _ends_at = -1

    def record(self, *transactions: Transaction) -> None:
        disk = self.disk
        self._death, disk.death = disk.death, None
        if self._death is None and not disk.fails():
            super().record(*transactions)
            return
        if self._death is not None:
            disk.before, disk.after = self.balance(), None
        if self._death is FaultKind.KILLED_BEFORE_COMMIT:
            self._die("before a commit")
        synced = self._log_bytes()
        is_whole = self._death in (FaultKind.KILLED_AFTER_COMMIT, FaultKind.POWER_CUT_IN_COMMIT)
        self._rows, self._ends_at = 0, -1 if is_whole else disk.draw.randrange(len(transactions) + 1)
        try:
            super().record(*transactions)
        finally:
            self._ends_at = -1
        disk.after = self.balance()
        if self._death is FaultKind.POWER_CUT_IN_COMMIT:
            self._die("in a commit, by a power cut", torn_from=synced)
        disk.before = disk.after
        self._die("after a commit, before it answered")

    def _write(self, transaction: Transaction) -> None:
        if self._rows == self._ends_at:
            self._end()
        super()._write(transaction)
        self._rows += 1
        if self._rows == self._ends_at:
            self._end()

    def _end(self) -> None:
        if self._death is not None:
            self._die("between the rows of a commit")
        raise sqlite3.OperationalError("database or disk is full")

    def _die(self, when: str, *, torn_from: int | None = None) -> None:
        self.disk.keep(torn_from=torn_from)
        self.disk.on_death(when)
        raise DiedError

    def _log_bytes(self) -> int:
        log = self._path.with_name(f"{self._path.name}-wal")
        return log.stat().st_size if log.exists() else 0
