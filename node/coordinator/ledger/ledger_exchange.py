"""A ledger between a PostgreSQL database and a SQLite file: backups, restores, and a change of engine.

    back up    database --one moment of it--> staged file --verified, synced--> renamed to its name
    restore    database --> kept aside as a file
               copy --> staged --accepted loss: a new generation--> verified
               staged --one transaction, under a new epoch--> database

The file is a ledger as any other: what reads, verifies and exports one works on it.
"""

import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from node.coordinator.ledger.leadership import Leadership
from node.coordinator.ledger.ledger_check import LedgerReport, examine, reading
from node.coordinator.ledger.ledger_copies import Restored, begin_generation_of, stage, verified
from node.coordinator.ledger.ledger_postgresql import check_epoch, connect, marked
from node.coordinator.ledger.ledger_schema import columns_of, insertion, owner_of, prepare, tables, upgrade
from node.errors import DeposedError, StartupError
from node.system import durable

_ROWS_AT_ONCE = 1000


def back_up_database(url: str, *, to: Path) -> LedgerReport:
    """Copy a database's ledger as it is at one moment, whether a coordinator writes it or not.

    Args:
        to: Replaced only when the copy is whole and on disk.
    Raises:
        StartupError: the database cannot be read, its ledger is damaged, or the copy cannot be written.
    """
    staged = to.with_name(f".{to.name}.new")
    try:
        with closing(connect(url, name="heterorl-backup")) as database:
            _copy_out(database, staged)
        findings = examine(staged)
        if findings.problems:
            raise StartupError(
                f"the ledger in the database is damaged: {findings.problems[0]}",
                fix=f"Restore an older copy. {to} was not written.",
            )
        durable.sync(staged)
        durable.rename(staged, to)
    except (OSError, sqlite3.Error, psycopg.Error) as error:
        raise StartupError(
            f"the ledger in the database could not be copied to {to}: {error}",
            fix="Check the database, the path and the free space.",
        ) from error
    finally:
        staged.unlink(missing_ok=True)
    return replace(findings, path=str(to))


def restore_database(copy: Path, url: str, *, accepts_loss: bool, now: float) -> Restored:
    """Put a copy in the place of a database's ledger, which is kept aside as a file beside the copy.

    Args:
        copy: Of the run, from either engine.
        url: An empty database, or one with the run's ledger.
        accepts_loss: See ``ledger_copies.restore``.
        now: Unix seconds.
    Raises:
        StartupError: a coordinator leads; the copy is damaged or of another run; the database refuses.
    """
    run_id = verified(copy, copy).run_id
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    aside, staged = copy.with_name(f"{copy.name}.replaced-{stamp}"), copy.with_name(f".{copy.name}.new")
    first_slot = None
    with closing(Leadership(url, run_id=run_id, address="heterorl-node ledger restore")) as leadership:
        if not leadership.try_to_lead():
            raise StartupError(
                "the ledger's database is away"
                if (leader := leadership.leader()) is None
                else f"a coordinator leads the run, at {leader.address}",
                fix="Stop every coordinator of the run, check the database, and try again.",
            )
        try:
            with closing(connect(url, name="heterorl-restore")) as database:
                _copy_out(database, aside)
                durable.sync(aside)
                stage(copy, staged)
                with closing(sqlite3.connect(staged, isolation_level=None)) as file:
                    upgrade(file)
                if accepts_loss:
                    first_slot = begin_generation_of(staged, known=(aside,), now=now)
                findings = verified(staged, copy)
                _copy_in(staged, database, epoch=leadership.epoch, first_slot=first_slot)
        except (OSError, sqlite3.Error, psycopg.Error, DeposedError) as error:
            raise StartupError(
                f"{copy} could not be restored to the database: {error}",
                fix="Check both, and the free space. The ledger in the database is as it was, unless the "
                "connection broke at the very end: `heterorl-node ledger backup --database` shows which.",
            ) from error
        finally:
            staged.unlink(missing_ok=True)
    return Restored(replace(findings, path="the database"), aside, first_slot)


def _copy_out(database: "psycopg.Connection[Any]", target: Path) -> None:
    durable.make_directory(target.parent)
    target.unlink(missing_ok=True)
    with closing(sqlite3.connect(target, isolation_level=None)) as file, database.transaction():
        database.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        prepare(file, target, run_id=owner_of(partial(_execute, database)))
        file.execute("PRAGMA journal_mode = DELETE")
        file.execute("BEGIN")
        for name in tables():
            with database.cursor(name="rows") as rows:
                rows.itersize = _ROWS_AT_ONCE
                rows.execute(f"SELECT {columns_of(name)} FROM {name} ORDER BY {_order(name)}")
                file.executemany(insertion(name), rows)
        file.execute("COMMIT")
    target.chmod(0o600)


def _copy_in(
    source: Path, database: "psycopg.Connection[Any]", *, epoch: int, first_slot: int | None
) -> None:
    with reading(source) as file, database.transaction():
        check_epoch(database, epoch)
        for name in tables():
            database.execute(f"DELETE FROM {name}")
            with database.cursor().copy(f"COPY {name} ({columns_of(name)}) FROM STDIN") as rows:
                for row in file.execute(f"SELECT {columns_of(name)} FROM {name} ORDER BY {_order(name)}"):
                    rows.write_row(row)
        database.execute("DELETE FROM accepted_loss")
        if first_slot is not None:
            database.execute("INSERT INTO accepted_loss VALUES (%s)", [first_slot])


def _order(table: str) -> str:
    """Return what the rows of a table are to come in the order of."""
    return ", ".join(f'"{column}"' for column in tables()[table].key)


def _execute(database: "psycopg.Connection[Any]", statement: str, values: Sequence[Any] = ()) -> Any:
    return database.execute(marked(statement), values)
