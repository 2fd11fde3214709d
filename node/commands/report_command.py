"""``heterorl-node report``: what a run was and how it went, as one HTML file."""

import argparse
from pathlib import Path
from typing import Final

from node import durable
from node.commands.report_page import report_page
from node.commands.run_records import read_records
from node.coordinator.ledger.ledger_check import no_ledger
from node.coordinator.ledger.ledger_file import FILE_NAME
from node.errors import COMMAND_LINE, ConfigError, StartupError
from node.exit_code import ExitCode
from node.identity.files import cannot_make
from node.run import Role

EXAMPLE: Final = """\
  heterorl-node report runs/first --out first.html
  heterorl-node report --learner /srv/learner-state --ledger /backup/ledger.sqlite --out first.html

The file needs nothing else: no script, no network. Curves come from the learner's log of steps; held-out
scores, verdicts and times of announcement from the coordinator's ledger. Where the two are on different
machines, name a copy of each; with one of them, the report has its half. The run may be going on.
"""

STEPS: Final = "steps.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node report``."""
    parser.add_argument(
        "run", type=Path, nargs="?", metavar="RUN_DIR", help="node.state_dir of learner and coordinator"
    )
    parser.add_argument(
        "--learner", type=Path, metavar="DIR", help=f"in place of RUN_DIR/learner: a directory with {STEPS}"
    )
    parser.add_argument(
        "--ledger", type=Path, metavar="FILE", help=f"in place of RUN_DIR/coordinator/{FILE_NAME}"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the report; replaced")


def run(arguments: argparse.Namespace) -> int:
    """Write the report.

    Raises:
        StartupError: there are no records, one cannot be read, or the file cannot be written.
    """
    learner, ledger = arguments.learner, arguments.ledger
    if learner is not None and not (learner / STEPS).is_file():
        raise StartupError(f"there is no {STEPS} in {learner}", fix="Check --learner, or leave it out.")
    if ledger is not None and not ledger.is_file():
        raise no_ledger(ledger)
    if arguments.run is None and learner is None and ledger is None:
        raise ConfigError(
            key="RUN_DIR",
            value=None,
            source=COMMAND_LINE,
            rule="is required where neither --learner nor --ledger is given",
            fix="See heterorl-node report --help",
        )
    if arguments.run is not None:
        learner = learner or arguments.run / Role.LEARNER
        ledger = ledger or arguments.run / Role.COORDINATOR / FILE_NAME
    steps = learner if learner is not None and (learner / STEPS).is_file() else None
    found_ledger = ledger if ledger is not None and ledger.is_file() else None
    if steps is None and found_ledger is None:
        looked = f"{arguments.run / Role.LEARNER / STEPS}, {ledger}"
        raise StartupError(
            f"there is no record of a run; looked for {looked}",
            fix="Name the run's state directory, or --learner and --ledger.",
        )
    page = report_page(read_records(steps, found_ledger))
    try:
        durable.write(arguments.out, page)
    except OSError as error:
        raise cannot_make(arguments.out, error, fix="Choose another path.") from error
    print(f"{arguments.out} ({len(page)} bytes)")
    return ExitCode.DRAINED
