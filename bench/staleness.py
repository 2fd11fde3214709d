"""``python -m bench.staleness``: which objective still learns from completions of old policies.

    tune      every method with as many settings on the design tasks --> OUT/staleness_tuning.jsonl,
              and what follows from them --> OUT/staleness_frozen.json; commit that
    report    the frozen settings on the report tasks --> OUT/staleness_report.jsonl, staleness.md, .png;
              refuses settings that are not committed or do not follow from the tuning

A line is a finished cell, and a run that was cut off goes on where it was. The cells (4.5 MB) are not in the
repository; its history has those of the committed report. ``--quick`` does all of it, small, in minutes. What
is held constant, and what the numbers mean, is written at the top of the report.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.staleness_lab.cells import Cell
from bench.staleness_lab.frozen import Frozen, RefusedError, checked
from bench.staleness_lab.plan import FULL, QUICK, Plan
from bench.staleness_lab.pool import cache_data, run_cells
from bench.staleness_lab.report import write_report
from bench.staleness_lab.results import Results
from bench.staleness_lab.tuning import UnfinishedError

RECORD: Final = Path(__file__).parent / "results"
"""Where the full tables live."""

_QUICK_OUT: Final = Path("runs/staleness-quick")
DATA: Final = Path("runs/staleness-data")
_FROZEN: Final = "staleness_frozen.json"


def main() -> int:
    """Do what was asked; return the exit code."""
    arguments = _arguments()
    plan = QUICK if arguments.quick else FULL
    out = arguments.out or (_QUICK_OUT if arguments.quick else RECORD)
    out.mkdir(parents=True, exist_ok=True)
    try:
        if arguments.quick or arguments.command == "tune":
            _tune(plan, out, arguments)
        if arguments.quick or arguments.command == "report":
            _report(plan, out, arguments)
    except (RefusedError, UnfinishedError) as refusal:
        print(f"staleness: {refusal}", file=sys.stderr)
        return 1
    return 0


def _tune(plan: Plan, out: Path, arguments: argparse.Namespace) -> None:
    results = Results(out / "staleness_tuning.jsonl")
    _fill(plan.tuning_cells(), results, arguments)
    Frozen.of(plan, results).write(out / _FROZEN)
    print(f"{out / _FROZEN}: commit it, then run the report")


def _report(plan: Plan, out: Path, arguments: argparse.Namespace) -> None:
    tuning, results = Results(out / "staleness_tuning.jsonl"), Results(out / "staleness_report.jsonl")
    frozen = checked(out / _FROZEN, plan, tuning, is_committed=not arguments.quick)
    if not arguments.no_runs:
        _fill(plan.report_cells(frozen.settings), results, arguments)
    write_report(
        out,
        plan,
        frozen,
        is_committed=not arguments.quick,
        tuning=tuning,
        results=results,
        workers=arguments.workers,
    )
    print(out / "staleness.md")


def _fill(cells: list[Cell], results: Results, arguments: argparse.Namespace) -> None:
    missing = [cell for cell in cells if cell not in results]
    cache_data({cell.task for cell in missing}, arguments.data)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=len(missing))
        for outcome in run_cells(missing, workers=arguments.workers, data=arguments.data):
            results.add(outcome)
            cell = outcome.cell
            about = f"{cell.purpose} {cell.task} {cell.method} {cell.delay} {cell.staleness}"
            progress.update(bar, advance=1, description=f"{about}: {outcome.ends.mean():.3f}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.staleness", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", nargs="?", choices=("tune", "report"))
    parser.add_argument("--quick", action="store_true", help="tune and report on little, in minutes")
    parser.add_argument("--out", type=Path, help=f"folder of results (default {RECORD}, quick: {_QUICK_OUT})")
    parser.add_argument(
        "--data", type=Path, default=DATA, help="folder of what packages provide; made if missing"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: cores)")
    parser.add_argument("--no-runs", action="store_true", help="report what is finished, run no cell")
    arguments = parser.parse_args()
    if (arguments.command is None) == (not arguments.quick):
        parser.error("say tune, report or --quick")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
