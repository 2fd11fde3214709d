"""``heterorl-node report``: a run's page as one HTML file, from the records of learner and coordinator."""

import argparse
import json
import sqlite3
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from node.coordinator.ledger.ledger_check import facts_in, no_ledger, read_evaluations, reading
from node.coordinator.ledger.ledger_file import FILE_NAME
from node.coordinator.ledger.ledger_schema import owner_of
from node.coordinator.work.samplers.tallies import Tally
from node.errors import COMMAND_LINE, ConfigError, StartupError
from node.exit_code import ExitCode
from node.identity.files import cannot_make
from node.page.html import rendered
from node.page.run_sections import SHOWN_GROUPS, RunView, run_sections
from node.page.samples_file import FILE_NAME as SAMPLES
from node.page.samples_file import SamplesFile
from node.page.step_curves import StepCurves
from node.process.last_start import FILE_NAME as LAST_START
from node.step_log_parts import log_lines
from node.system import durable
from node.system.clock import moment
from node.values.evaluation import REWARD, best_of
from node.values.roles import Role

EXAMPLE: Final = """\
  heterorl-node report runs/first --out first.html
  heterorl-node report --learner /srv/learner-state --ledger /backup/ledger.sqlite --out first.html

The file needs nothing else: no script, no network. Curves and completions come from the learner's files;
held-out scores, verdicts and times of announcement from the coordinator's ledger. Where the two are on
different machines, name a copy of each; with one of them, the page has its half. The run may be going on;
the page of its telemetry port shows who waits for whom, too.
"""

STEPS: Final = "steps.jsonl"
_SLOTS: Final = "SELECT state, count(*) FROM slots WHERE kind = 'train' GROUP BY state"


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
    parser.add_argument("--no-samples", action="store_true", help="leave prompts and completions out")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the page; replaced")


def run(arguments: argparse.Namespace) -> int:
    """Write the page.

    Raises:
        StartupError: there are no records, one cannot be read, or the file cannot be written.
    """
    learner, ledger = _records(arguments)
    view = RunView() if ledger is None else _ledger_view(ledger)
    if learner is not None:
        has_samples = not arguments.no_samples
        samples = SamplesFile(learner / SAMPLES).newest(SHOWN_GROUPS)[::-1] if has_samples else None
        settings = {**view.settings, **_settings(learner)}
        steps = StepCurves.of_log(log_lines(learner / STEPS))
        view = replace(view, steps=steps, samples=samples, settings=settings)
    title = f"Run {view.run_id}" if view.run_id else "A run"
    page = rendered(title, f"written {moment(time.time())}", run_sections(view))
    try:
        durable.write(arguments.out, page)
    except OSError as error:
        raise cannot_make(arguments.out, error, fix="Choose another path.") from error
    print(f"{arguments.out} ({len(page)} bytes)")
    return ExitCode.DRAINED


def _records(arguments: argparse.Namespace) -> tuple[Path | None, Path | None]:
    """Return the learner's directory and the ledger, at least one."""
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
    found_learner = learner if learner is not None and (learner / STEPS).is_file() else None
    found_ledger = ledger if ledger is not None and ledger.is_file() else None
    if found_learner is None and found_ledger is None:
        looked = f"{arguments.run / Role.LEARNER / STEPS}, {ledger}"
        raise StartupError(
            f"there is no record of a run; looked for {looked}",
            fix="Name the run's state directory, or --learner and --ledger.",
        )
    return found_learner, found_ledger


def _ledger_view(path: Path) -> RunView:
    evaluations = read_evaluations(path)
    best = best_of(evaluations, evaluations[-1].best_by if evaluations else REWARD)
    verdicts: dict[str, dict[str, int]] = {}
    try:
        with reading(path) as connection:
            connection.execute("BEGIN")  # a snapshot: a coordinator may go on writing
            for tally in facts_in(connection, Tally):
                verdicts[tally.sampler_id] = {verdict.value: n for verdict, n in tally.verdicts.items()}
            return RunView(
                run_id=owner_of(connection.execute),
                evaluations=evaluations,
                remarks={} if best is None else {best.version: "best"},
                announced_at_s=dict(connection.execute("SELECT number, at_s FROM versions ORDER BY number")),
                verdicts=verdicts,
                slots=dict(connection.execute(_SLOTS)),
                settings=_settings(path.parent),
            )
    except (sqlite3.Error, ValueError) as error:
        raise StartupError(
            f"the ledger {path} cannot be read: {error}", fix="`heterorl-node ledger check` says more."
        ) from error


def _settings(state: Path) -> dict[str, object]:
    with suppress(OSError, ValueError):
        found = json.loads((state / LAST_START).read_bytes())
        return found if isinstance(found, dict) else {}
    return {}
