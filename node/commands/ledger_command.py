"""``heterorl-node ledger VERB``: back up, restore, check and export the coordinator's ledger."""

import argparse
import dataclasses
import importlib
import json
import sqlite3
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Final

from node.commands.terminal import add_coordinator_state, printable
from node.coordinator.ledger.backup_record import FILE_NAME as BACKUPS_FILE
from node.coordinator.ledger.backup_record import BackupRecord
from node.coordinator.ledger.ledger_check import LedgerReport, examine, no_ledger
from node.coordinator.ledger.ledger_copies import back_up, restore
from node.coordinator.ledger.ledger_export import export
from node.coordinator.ledger.ledger_file import FILE_NAME
from node.errors import COMMAND_LINE, StartupError
from node.exit_code import ExitCode
from node.system.extras import NeededPackage
from node.values.roles import Role

EXAMPLE: Final = """\
  while the run goes on, from cron or a timer; either the copy is complete, or the old one stays:
    heterorl-node ledger backup --state-dir DIR --to /backup/ledger.sqlite
  the same from a database; with restore, and the other way round, a run changes its engine:
    heterorl-node ledger backup --database postgresql://hub@db/run --to /backup/ledger.sqlite
  to see whether a ledger is complete, and up to which step:
    heterorl-node ledger check /backup/ledger.sqlite
  after a loss, with the coordinator stopped:
    heterorl-node ledger restore /backup/ledger.sqlite --state-dir DIR --accept-loss
  everything as JSON lines, a file a table, for jq, pandas, DuckDB or Polars:
    heterorl-node ledger export ledger.sqlite --to tables/
  what became of slot 1408, from its table and those of its attempts and of the groups trained on:
    jq -c 'select(.number == 1408 or .slot == 1408)' tables/{slots,attempts,waiting}.jsonl
    grep '"group_id":"1408[.]' tables/trained.jsonl
  whether the learner's log tells the same, group by group; it may have newer steps at its end:
    diff <(jq -c '{version} + .groups[]' steps*.jsonl) tables/trained.jsonl

A learner refuses a ledger that lacks some of its steps, and the run waits: the learner for the "newest
ledger", the samplers for the "ledger". Restore the newest copy if there is one. If it is gone, restore with
--accept-loss: open work is abandoned, and slots are numbered anew, so that no group id is used twice. The
learner goes on from its own version and logs which steps were lost.
"""

_A_LEDGER: Final = "a copy, or a running coordinator's ledger"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="backup|restore|check|export")
    backup = verbs.add_parser("backup", help="copy the ledger while the run goes on; checked, then renamed")
    backup.add_argument(
        "--to", type=Path, required=True, metavar="FILE", help="replaced once the copy is complete"
    )
    put_back = verbs.add_parser("restore", help="replace the ledger by a copy; stop the coordinator first")
    put_back.add_argument("file", type=Path, metavar="FILE", help="a copy, or the ledger itself")
    put_back.add_argument(
        "--accept-loss",
        action="store_true",
        help="go on without the steps that the copy lacks; slots are numbered anew",
    )
    check = verbs.add_parser("check", help="read a ledger from end to end; exit code 1 if it is damaged")
    check.add_argument("file", type=Path, metavar="FILE", help=_A_LEDGER)
    tables = verbs.add_parser("export", help="write every table as a file of JSON lines")
    tables.add_argument("file", type=Path, metavar="FILE", help=_A_LEDGER)
    tables.add_argument("--to", type=Path, required=True, metavar="DIR", help="files there are replaced")
    for one in (backup, put_back):
        where = one.add_mutually_exclusive_group(required=True)
        add_coordinator_state(where, required=False)
        where.add_argument(
            "--database",
            metavar="URL",
            help="in place of it: the run's PostgreSQL database, as coordinator.ledger",
        )
    for one in (backup, put_back, check, tables):
        one.add_argument("--json", action="store_true", help="one JSON object instead of lines")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; 1 where ``check`` finds a problem."""
    try:
        match arguments.verb:
            case "backup":
                _show(_back_up(arguments), "backed up", as_json=arguments.json)
            case "restore":
                _restore(arguments)
            case "check":
                return _check(arguments.file, as_json=arguments.json)
            case "export":
                _export(arguments.file, arguments.to, as_json=arguments.json)
    except sqlite3.Error as error:
        raise StartupError(
            f"the ledger cannot be read: {error}", fix="See `heterorl-node ledger check FILE`."
        ) from error
    return ExitCode.DRAINED


def _back_up(arguments: argparse.Namespace) -> LedgerReport:
    """Copy a ledger; of a file, note beside it what came of that, for the coordinator's metrics."""
    if arguments.database is not None:
        from_database: LedgerReport = _exchange().back_up_database(arguments.database, to=arguments.to)
        return from_database
    ledger, to = _ledger(arguments.state_dir), arguments.to
    note = ledger.with_name(BACKUPS_FILE)
    record = BackupRecord.load(note)
    try:
        findings = back_up(ledger, to=to)
        record = BackupRecord(made_at_s=time.time(), made_to=str(to))
    except StartupError as error:
        record = record.after_failure(str(error))
        raise
    finally:
        try:
            record.save(note)
        except OSError as error:
            _say(f"{note} cannot be written ({error.strerror}): the coordinator's metrics do not show this.")
    return findings


def _restore(arguments: argparse.Namespace) -> None:
    file, accepts_loss, now = arguments.file, arguments.accept_loss, time.time()
    if arguments.database is not None:
        done = _exchange().restore_database(file, arguments.database, accepts_loss=accepts_loss, now=now)
    else:
        ledger = _ledger(arguments.state_dir, may_be_missing=True)
        done = restore(file, ledger=ledger, accepts_loss=accepts_loss, now=now)
    _show(done.ledger, f"restored from {arguments.file}", as_json=arguments.json)
    if done.aside is not None:
        _say(f"The ledger that was there is {done.aside}.")
    if done.first_slot is None:
        _say("Start the coordinator. A learner that knows of later steps waits, and `status` names them.")
    else:
        _say(f"Slots go on from {done.first_slot}. Start the coordinator; the learner says what was lost.")


def _check(path: Path, *, as_json: bool) -> int:
    try:
        findings = examine(path)
    except FileNotFoundError as error:
        raise no_ledger(path) from error
    problems = len(findings.problems)
    _show(findings, f"{problems} problem{'s'[: problems != 1]}" if problems else "whole", as_json=as_json)
    return ExitCode.FAILED if problems else ExitCode.DRAINED


def _export(path: Path, to: Path, *, as_json: bool) -> None:
    if not path.is_file():
        raise no_ledger(path)
    try:
        rows = export(path, to)
    except OSError as error:
        raise StartupError(
            f"the tables cannot be written to {to}: {error}",
            fix="Free space there, or name another directory.",
        ) from error
    if as_json:
        print(json.dumps(rows))
        return
    for name, n in rows.items():
        print(f"{to / name}.jsonl: {n} rows")


def _exchange() -> ModuleType:
    NeededPackage("ledger", "--database", "psycopg", "postgresql", source=COMMAND_LINE).check()
    return importlib.import_module("node.coordinator.ledger.ledger_exchange")


def _ledger(state_dir: Path, *, may_be_missing: bool = False) -> Path:
    path = state_dir / Role.COORDINATOR / FILE_NAME
    if not (path.parent if may_be_missing else path).exists():
        raise StartupError(
            f"there is no ledger at {path}", fix="Set --state-dir to the coordinator's node.state_dir."
        )
    return path


def _show(findings: LedgerReport, verdict: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(dataclasses.asdict(findings)))
        return
    print(f"{'ledger':10}{findings.path}: {verdict}")
    for problem in findings.problems:
        print(printable(f"{'problem':10}{problem}"))
    if not findings.schema:
        return
    lost = f", {findings.lost_steps} of them lost as accepted" if findings.lost_steps else ""
    slots = ", ".join(f"{n} {state}" for state, n in sorted(findings.slots.items())) or "none yet"
    begun = f", generation {findings.generations}" if findings.generations else ""
    print(f"{'run':10}{findings.run_id}, schema {findings.schema}")
    print(
        f"{'steps':10}up to version {findings.last_step}{lost}; {findings.trained_groups} groups trained on"
    )
    print(f"{'versions':10}announced up to {findings.newest_version}")
    print(f"{'slots':10}{slots}; next {findings.next_slot}{begun}")
    print(f"{'spool':10}{findings.groups} groups")


def _say(text: str) -> None:
    print(text, file=sys.stderr)
