"""Copies of a ledger: a backup made while the run goes on, and a restore in its place.

    backup     ledger --one moment of it--> staged --verified, synced--> renamed to its name
    restore    copy --> staged --accepted loss: a new generation--> verified, synced
               replaced ledger --> kept aside;  staged --> renamed to the ledger's name

Whatever a crash interrupts, there is one whole ledger under the ledger's name.
"""

import os
import shutil
import sqlite3
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from node.coordinator.ledger.ledger_check import LedgerReport, examine, next_slot_of, no_ledger, reading
from node.coordinator.ledger.ledger_file import accept_loss, lock_ledger
from node.coordinator.ledger.ledger_schema import begin_generation
from node.coordinator.work.slots.slot_generations import Generation
from node.errors import StartupError
from node.system import durable

SLOTS_PER_SECOND: Final = 1_000_000
"""A generation begins at the Unix time times this. No run leases as many a second, so a later generation
always begins higher, even where the ledger before it was overwritten. Fits the 16 digits of an id until
2286."""

_ASIDE: Final = "replaced"


@dataclass(frozen=True, slots=True)
class Restored:
    ledger: LedgerReport
    aside: Path | None
    """Where the ledger is that was there before; None: there was none."""
    first_slot: int | None
    """The new generation's first slot; None where no loss was accepted."""


def back_up(ledger: Path, *, to: Path) -> LedgerReport:
    """Copy a ledger as it is at one moment, whether a coordinator writes it or not.

    Args:
        to: Replaced only when the copy is whole and on disk.
    Raises:
        StartupError: the ledger cannot be read, is damaged, or the copy cannot be written.
    """
    if to.exists() and ledger.exists() and to.samefile(ledger):
        raise StartupError(f"{to} is the ledger itself", fix="Name another file with --to.")
    staged = to.with_name(f".{to.name}.new")
    try:
        stage(ledger, staged)
        findings = verified(staged, ledger)
        durable.sync(staged)
        durable.rename(staged, to)
    except (OSError, sqlite3.Error) as error:
        raise StartupError(
            f"the ledger {ledger} could not be copied to {to}: {error}",
            fix="Check both paths, their permissions and the free space.",
        ) from error
    finally:
        with suppress(OSError):  # where it could not be made, it cannot be removed
            staged.unlink(missing_ok=True)
    return replace(findings, path=str(to))


def restore(copy: Path, *, ledger: Path, accepts_loss: bool, now: float) -> Restored:
    """Put a copy in the ledger's place; the replaced one is kept aside.

    Args:
        copy: May be the ledger itself, where an older one was put back by hand.
        accepts_loss: Begin a new generation of slot numbers. Slots that are open in the copy are lost,
            because they may have been trained on since; the learner reports which steps were lost.
        now: Unix seconds.
    Raises:
        StartupError: a coordinator runs; the copy is damaged or of another run; the disk is full.
    """
    if not copy.is_file():
        raise no_ledger(copy)
    durable.make_directory(ledger.parent)
    lock = lock_ledger(ledger)
    staged = ledger.with_name(f".{ledger.name}.new")
    try:
        stage(copy, staged)
        _check_run(staged, ledger)
        first_slot = (
            begin_generation_of(staged, known=(ledger, *_kept_aside(ledger)), now=now)
            if accepts_loss
            else None
        )
        findings = verified(staged, copy)
        durable.sync(staged)
        aside = _set_aside(ledger, now=now) if ledger.exists() else None
        if first_slot is not None:
            accept_loss(ledger, first_slot=first_slot)
        durable.rename(staged, ledger)
    except (OSError, sqlite3.Error) as error:
        raise StartupError(
            f"{copy} could not be restored to {ledger}: {error}",
            fix="Check both paths, their permissions and the free space. The ledger is as it was.",
        ) from error
    finally:
        staged.unlink(missing_ok=True)
        lock.release()
    return Restored(replace(findings, path=str(ledger)), aside, first_slot)


def stage(source: Path, target: Path) -> None:
    """Copy a ledger at one moment, its -wal file included, into a file of its own."""
    durable.make_directory(target.parent)
    target.unlink(missing_ok=True)
    with reading(source, as_it_is=True) as connection:
        # Bytes: SQLite takes text for UTF-8, which a path is not everywhere.
        connection.execute("VACUUM INTO CAST(? AS TEXT)", [os.fsencode(target)])
    target.chmod(0o600)


def verified(copy: Path, source: Path) -> LedgerReport:
    """Return what a whole copy of ``source`` holds. Raises StartupError: it is damaged."""
    findings = examine(copy)
    if findings.problems:
        raise StartupError(
            f"the ledger {source} is damaged: {findings.problems[0]}",
            fix=f"`heterorl-node ledger check {source}` says more. Take an older copy.",
        )
    return findings


def _check_run(copy: Path, ledger: Path) -> None:
    ours, theirs = (examine(path).run_id if path.exists() else "" for path in (ledger, copy))
    if ours and theirs and ours != theirs:
        raise StartupError(
            f"the copy is of run {theirs!r}, the ledger {ledger} is of run {ours!r}",
            fix="Take a copy of this run.",
        )


def begin_generation_of(staged: Path, *, known: Iterable[Path], now: float) -> int:
    """Begin a new generation in a copy, above what any ``known`` ledger has leased; return its first slot."""
    lost_from = next_slot_of(staged)
    first = max(lost_from, *map(next_slot_of, known), int(now * SLOTS_PER_SECOND))
    with closing(sqlite3.connect(staged, isolation_level=None)) as connection:
        begin_generation(connection, Generation(0, first, lost_from, now))
    return first


def _kept_aside(ledger: Path) -> list[Path]:
    paths = ledger.parent.glob(f"{ledger.name}.{_ASIDE}-*")
    return sorted(path for path in paths if not path.name.endswith(("-wal", "-shm", "-journal")))


def _set_aside(ledger: Path, *, now: float) -> Path:
    """Rename the replaced ledger out of the way, with all that is in its -wal file."""
    stem = f"{ledger.name}.{_ASIDE}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now))}"
    names = (stem, *(f"{stem}.{number}" for number in range(1, 1000)))
    aside = next(path for path in map(ledger.with_name, names) if not path.exists())
    if not examine(ledger).problems:
        _fold_in_wal(ledger)
    try:
        os.link(ledger, aside)
    except OSError:  # a file system without links
        shutil.copy2(ledger, aside)
        durable.sync(aside)
    # A damaged ledger is kept as it is, in two files. This one must not meet another ledger.
    wal = ledger.with_name(f"{ledger.name}-wal")
    if wal.exists():
        durable.rename(wal, aside.with_name(f"{aside.name}-wal"))
    ledger.with_name(f"{ledger.name}-shm").unlink(missing_ok=True)
    return aside


def _fold_in_wal(ledger: Path) -> None:
    with closing(sqlite3.connect(ledger, isolation_level=None)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("PRAGMA journal_mode = DELETE")
