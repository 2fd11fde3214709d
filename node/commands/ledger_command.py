"""``heterorl-node ledger backup|verify|restore``: back up, verify and restore the coordinator's ledger."""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Final

from node.commands.terminal import add_coordinator_state
from node.coordinator.ledger.ledger_check import Findings, examine
from node.coordinator.ledger.ledger_copies import back_up, restore
from node.coordinator.ledger.ledger_file import FILE_NAME
from node.errors import StartupError
from node.exit_code import ExitCode
from node.run import Role

EXAMPLE: Final = """\
  while the run goes on, from cron or a timer; either the copy is complete, or the old one stays:
    heterorl-node ledger backup --state-dir DIR --to /backup/ledger.sqlite
  to see whether a ledger is complete, and up to which step:
    heterorl-node ledger verify /backup/ledger.sqlite
  after a loss, with the coordinator stopped:
    heterorl-node ledger restore /backup/ledger.sqlite --state-dir DIR --accept-loss

A learner refuses a ledger that lacks some of its steps, and the run waits: the learner for the "newest
ledger", the samplers for the "ledger". Restore the newest copy if there is one. If it is gone, restore with
--accept-loss: open work is abandoned, and slots are numbered anew, so that no group id is used twice. The
learner goes on from its own version and logs which steps were lost.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="backup|verify|restore")
    backup = verbs.add_parser("backup", help="copy the ledger while the run goes on; verified, then renamed")
    backup.add_argument(
        "--to", type=Path, required=True, metavar="FILE", help="replaced once the copy is complete"
    )
    verify = verbs.add_parser("verify", help="read a ledger from end to end; exit code 1 if it is damaged")
    verify.add_argument("file", type=Path, metavar="FILE", help="a copy, or a running coordinator's ledger")
    put_back = verbs.add_parser("restore", help="replace the ledger by a copy; stop the coordinator first")
    put_back.add_argument("file", type=Path, metavar="FILE", help="a copy, or the ledger itself")
    put_back.add_argument(
        "--accept-loss",
        action="store_true",
        help="go on without the steps that the copy lacks; slots are numbered anew",
    )
    for one in (backup, put_back):
        add_coordinator_state(one)
    for one in (backup, verify, put_back):
        one.add_argument("--json", action="store_true", help="one JSON object instead of lines")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; 1 where ``verify`` finds a problem."""
    match arguments.verb:
        case "backup":
            findings = back_up(_ledger(arguments.state_dir), to=arguments.to)
            _show(findings, "backed up", as_json=arguments.json)
        case "verify":
            return _verify(arguments.file, as_json=arguments.json)
        case "restore":
            _restore(arguments)
    return ExitCode.DRAINED


def _verify(path: Path, *, as_json: bool) -> int:
    try:
        findings = examine(path)
    except FileNotFoundError as error:
        raise StartupError(f"there is no ledger at {path}", fix="Check the path.") from error
    problems = len(findings.problems)
    _show(findings, f"{problems} problems" if problems else "whole", as_json=as_json)
    return ExitCode.FAILED if problems else ExitCode.DRAINED


def _restore(arguments: argparse.Namespace) -> None:
    ledger = _ledger(arguments.state_dir, may_be_missing=True)
    done = restore(arguments.file, ledger=ledger, accepts_loss=arguments.accept_loss, now=time.time())
    _show(done.ledger, f"restored from {arguments.file}", as_json=arguments.json)
    if done.aside is not None:
        _say(f"The ledger that was there is {done.aside}.")
    if done.first_slot is None:
        _say("Start the coordinator. A learner that knows of later steps waits, and `status` names them.")
    else:
        _say(f"Slots go on from {done.first_slot}. Start the coordinator; the learner says what was lost.")


def _ledger(state_dir: Path, *, may_be_missing: bool = False) -> Path:
    path = state_dir / Role.COORDINATOR / FILE_NAME
    if not (path.parent if may_be_missing else path).exists():
        raise StartupError(
            f"there is no ledger at {path}", fix="Set --state-dir to the coordinator's node.state_dir."
        )
    return path


def _show(findings: Findings, verdict: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(dataclasses.asdict(findings)))
        return
    print(f"{'ledger':10}{findings.path}: {verdict}")
    for problem in findings.problems:
        print(f"{'problem':10}{problem}")
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
