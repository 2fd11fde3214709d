"""``heterorl-node ledger VERB``: back up, verify, restore, read and export the coordinator's ledger."""

import argparse
import dataclasses
import importlib
import json
import sqlite3
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Final

from node.commands.terminal import add_coordinator_state, printable
from node.coordinator.ledger.backup_record import FILE_NAME as BACKUPS_FILE
from node.coordinator.ledger.backup_record import BackupRecord
from node.coordinator.ledger.ledger_check import Findings, examine, no_ledger
from node.coordinator.ledger.ledger_copies import back_up, restore
from node.coordinator.ledger.ledger_file import FILE_NAME
from node.coordinator.ledger.ledger_story import Story, compare
from node.coordinator.ledger.ledger_tables import SlotLife, export, read_slot
from node.errors import COMMAND_LINE, StartupError
from node.exit_code import ExitCode
from node.extras import NeededPackage
from node.run import Role

EXAMPLE: Final = """\
  while the run goes on, from cron or a timer; either the copy is complete, or the old one stays:
    heterorl-node ledger backup --state-dir DIR --to /backup/ledger.sqlite
  the same from a database; with restore, and the other way round, a run changes its engine:
    heterorl-node ledger backup --database postgresql://hub@db/run --to /backup/ledger.sqlite
  to see whether a ledger is complete, and up to which step:
    heterorl-node ledger verify /backup/ledger.sqlite
  to see whether the learner's log tells the same story, group by group:
    heterorl-node ledger verify ledger.sqlite --steps steps.jsonl
  what became of one slot, and everything for pandas, DuckDB or Polars:
    heterorl-node ledger show ledger.sqlite 1408
    heterorl-node ledger export ledger.sqlite --to tables/
  after a loss, with the coordinator stopped:
    heterorl-node ledger restore /backup/ledger.sqlite --state-dir DIR --accept-loss

A learner refuses a ledger that lacks some of its steps, and the run waits: the learner for the "newest
ledger", the samplers for the "ledger". Restore the newest copy if there is one. If it is gone, restore with
--accept-loss: open work is abandoned, and slots are numbered anew, so that no group id is used twice. The
learner goes on from its own version and logs which steps were lost.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="backup|verify|restore|show|export")
    backup = verbs.add_parser("backup", help="copy the ledger while the run goes on; verified, then renamed")
    backup.add_argument(
        "--to", type=Path, required=True, metavar="FILE", help="replaced once the copy is complete"
    )
    verify = verbs.add_parser("verify", help="read a ledger from end to end; exit code 1 if it is damaged")
    verify.add_argument("file", type=Path, metavar="FILE", help="a copy, or a running coordinator's ledger")
    verify.add_argument(
        "--steps", type=Path, metavar="FILE", help="the learner's steps.jsonl: exit code 1 if they disagree"
    )
    show = verbs.add_parser("show", help="what became of one slot: its attempts, its group, the step")
    show.add_argument("file", type=Path, metavar="FILE", help="a copy, or a running coordinator's ledger")
    show.add_argument("slot", metavar="SLOT", help="its number, or the id of a group: 1408 or 1408.1")
    tables = verbs.add_parser("export", help="write all tables as Parquet files")
    tables.add_argument("file", type=Path, metavar="FILE", help="a copy, or a running coordinator's ledger")
    tables.add_argument("--to", type=Path, required=True, metavar="DIR", help="files there are replaced")
    put_back = verbs.add_parser("restore", help="replace the ledger by a copy; stop the coordinator first")
    put_back.add_argument("file", type=Path, metavar="FILE", help="a copy, or the ledger itself")
    put_back.add_argument(
        "--accept-loss",
        action="store_true",
        help="go on without the steps that the copy lacks; slots are numbered anew",
    )
    for one in (backup, put_back):
        where = one.add_mutually_exclusive_group(required=True)
        add_coordinator_state(where, required=False)
        where.add_argument(
            "--database",
            metavar="URL",
            help="in place of it: the run's PostgreSQL database, as coordinator.ledger",
        )
    for one in (backup, verify, put_back, show, tables):
        one.add_argument("--json", action="store_true", help="one JSON object instead of lines")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; 1 where ``verify`` finds a problem."""
    try:
        return _run(arguments)
    except sqlite3.Error as error:
        raise StartupError(
            f"the ledger cannot be read: {error}", fix="See `heterorl-node ledger verify FILE`."
        ) from error
    except FileNotFoundError as error:
        raise no_ledger(error.args[0]) from error


def _run(arguments: argparse.Namespace) -> int:
    match arguments.verb:
        case "backup":
            if arguments.database is not None:
                findings = _exchange().back_up_database(arguments.database, to=arguments.to)
            else:
                findings = _back_up(_ledger(arguments.state_dir), to=arguments.to)
            _show(findings, "backed up", as_json=arguments.json)
        case "verify":
            return _verify(arguments.file, arguments.steps, as_json=arguments.json)
        case "show":
            _show_slot(arguments.file, arguments.slot, as_json=arguments.json)
        case "export":
            _export(arguments.file, arguments.to, as_json=arguments.json)
        case "restore":
            _restore(arguments)
    return ExitCode.DRAINED


def _back_up(ledger: Path, *, to: Path) -> Findings:
    """Copy a ledger, and note beside it what came of that, for the coordinator's metrics."""
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


def _verify(path: Path, steps: Path | None, *, as_json: bool) -> int:
    findings = examine(path)
    story = compare(path, steps) if steps is not None and not findings.problems else None
    problems = len(findings.problems) + (len(story.contradictions) if story else 0)
    _show(
        findings, f"{problems} problem{'s'[: problems != 1]}" if problems else "whole", story, as_json=as_json
    )
    return ExitCode.FAILED if problems else ExitCode.DRAINED


def _show_slot(path: Path, named: str, *, as_json: bool) -> None:
    number = named.partition(".")[0]
    life = (
        read_slot(path, int(number)) if number.isascii() and number.isdigit() and len(number) < 17 else None
    )
    if life is None:
        raise StartupError(
            f"{path} has no slot {named!r}", fix="Give the number of a slot that was leased, or a group's id."
        )
    if as_json:
        print(json.dumps(dataclasses.asdict(life)))
        return
    print(f"{'slot':10}{life.slot}: prompt {life.prompt_index}, {life.state}")
    for attempt in life.attempts:
        ended = attempt.get("failure") or ("handed in" if attempt["is_submitted"] else "no group yet")
        print(printable(f"{'attempt':10}{attempt['number']} by {attempt['sampler_id']}: {ended}"))
    for title, text in _lines_of(life):
        print(printable(f"{title:10}{text}"))


def _lines_of(life: SlotLife) -> Iterator[tuple[str, str]]:
    if life.spooled_at_s is not None:
        yield "spool", f"{life.spooled_bytes} bytes since {_moment(life.spooled_at_s)}"
    if life.trained_as:
        yield (
            "trained",
            (
                f"{life.trained_as}, in the step to version {life.version}, "
                f"{life.staleness_versions} versions old"
            ),
        )
    if life.bad_prompt:
        yield "set aside", life.bad_prompt


def _moment(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, tz=UTC).isoformat(timespec="seconds")


def _export(path: Path, to: Path, *, as_json: bool) -> None:
    NeededPackage("ledger", "export", "pyarrow", "data", source=COMMAND_LINE).check()
    try:
        rows = export(path, to)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.args[0] == path:
            raise
        raise StartupError(
            f"the tables cannot be written to {to}: {error}",
            fix="Free space there, or name another directory.",
        ) from error
    if as_json:
        print(json.dumps(rows))
        return
    for name, n in rows.items():
        print(f"{to / name}.parquet: {n} rows")


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


def _show(findings: Findings, verdict: str, story: Story | None = None, *, as_json: bool) -> None:
    if as_json:
        told = {"story": dataclasses.asdict(story)} if story else {}
        print(json.dumps(dataclasses.asdict(findings) | told))
        return
    print(f"{'ledger':10}{findings.path}: {verdict}")
    for problem in (*findings.problems, *(story.contradictions if story else ())):
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
    if story is not None:
        untold = f", the newest {story.untold_steps} not told to the ledger yet" if story.untold_steps else ""
        agrees = "contradicts the ledger" if story.contradictions else "tells the same"
        print(f"{'log':10}{story.log}: {agrees}, {story.steps} steps{untold}")


def _say(text: str) -> None:
    print(text, file=sys.stderr)
