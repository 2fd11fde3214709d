"""``heterorl-node evaluations``: how every evaluated version does on held-out prompts, from the ledger."""

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from node.commands.terminal import console, table
from node.coordinator.ledger.ledger_check import read_evaluations
from node.coordinator.ledger.ledger_file import FILE_NAME
from node.exit_code import ExitCode
from node.run import Evaluation, Role

EXAMPLE: Final = """\
  on the coordinator's machine, while the run goes on or later:
    heterorl-node evaluations --state-dir runs/first
  from a copy that `heterorl-node ledger backup` made, one JSON object a line:
    heterorl-node evaluations --ledger /backup/ledger.sqlite --json

Every token was drawn by the version itself. `answers` are groups that count, and of how many samplers: each
prompt is asked of coordinator.evaluation.answers samplers where there are as many. `cut` is the share of
completions that ended at the length limit.
"""

_COLUMNS: Final = "version|reward|+-|prompts|dropped|cut|tokens|answers|finished|took s"

_OF_ANSWERS: Final = ("reward_mean", "reward_standard_error", "cut_ratio", "tokens_mean")
"""Null in JSON where nothing was answered."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--state-dir", type=Path, metavar="DIR", help="the coordinator's node.state_dir: what `init` made"
    )
    where.add_argument("--ledger", type=Path, metavar="FILE", help="a ledger, or a copy of one")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    evaluations = read_evaluations(arguments.ledger or arguments.state_dir / Role.COORDINATOR / FILE_NAME)
    if arguments.json:
        for evaluation in evaluations:
            texts = {name: _object(getattr(evaluation, name)) for name in ("sampling", "metrics")}
            absent = {} if evaluation.has_score else dict.fromkeys(_OF_ANSWERS)
            print(json.dumps(dataclasses.asdict(evaluation) | texts | absent))
    elif evaluations:
        console().print(_table(evaluations))
    else:
        print("no version was evaluated; see coordinator.evaluation in `heterorl-node config`")
    return ExitCode.DRAINED


def _object(text: str) -> dict[str, Any]:
    given: dict[str, Any] = json.loads(text or "{}")
    return given


def _measured(evaluation: Evaluation) -> str:
    return ", ".join(f"{name} {mean:.4g}" for name, mean in _object(evaluation.metrics).items())


def _disagreement(evaluation: Evaluation) -> str:
    left_out = f"without {evaluation.left_out}" if evaluation.left_out else ""
    disputed = f"disputed by {evaluation.disputed_by}" if evaluation.disputed_by else ""
    return "; ".join(filter(None, (left_out, disputed)))


def _table(evaluations: Sequence[Evaluation]) -> Table:
    rows = table(*_COLUMNS.split("|"), right=True)
    if has_metrics := any(one.metrics for one in evaluations):
        rows.add_column("graders measured")
    if has_remarks := any(one.left_out or one.disputed_by for one in evaluations):
        rows.add_column("samplers")
    for one in evaluations:
        is_over = bool(one.finished_at_s)
        finished = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(one.finished_at_s))
        rows.add_row(
            str(one.version),
            f"{one.reward_mean:.4f}" if one.has_score else "-",
            f"{one.reward_standard_error:.4f}" if one.has_score else "-",
            f"{one.counted_prompts} of {one.prompts}",
            str(one.dropped_prompts),
            f"{one.cut_ratio:.1%}",
            f"{one.tokens_mean:.1f}",
            f"{one.answers} of {one.samplers}",
            finished if is_over else "under way",
            f"{one.finished_at_s - one.started_at_s:.0f}" if is_over else "-",
            *([_measured(one)] if has_metrics else []),
            *([_disagreement(one)] if has_remarks else []),
        )
    return rows
