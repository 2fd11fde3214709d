"""``python -m bench.staleness``: which objective still learns from completions of old policies.

    report    runs the frozen settings on the report tasks --> OUT/staleness_report.jsonl.gz, and writes
              OUT/staleness.md; refuses settings that are not committed
    confirm   does the same with plainer forms of the default, on tasks of its own, and says which the rule
              chooses --> OUT/staleness_confirm.jsonl.gz, OUT/staleness_confirm.md

A line is a finished cell, and a run that was cut off goes on where it was. ``--quick`` does all of it,
small, in a minute. What is held constant, and what the numbers mean, is written at the top of the report.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from bench.staleness_lab.cells import Cell
from bench.staleness_lab.confirming import confirming_cells
from bench.staleness_lab.confirming_report import write_confirming_report
from bench.staleness_lab.frozen import RefusedError, freezing_commit, read_settings
from bench.staleness_lab.plan import FIRST, report_cells
from bench.staleness_lab.pool import run_cells
from bench.staleness_lab.report import write_report
from bench.staleness_lab.results import Results

RECORD: Final = Path(__file__).parent / "results"
"""Where the full tables live."""

_QUICK_OUT: Final = Path("runs/staleness-quick")
_QUICK_VERSIONS: Final = 30
_QUICK_SEEDS: Final = (0, 1, 2)
"""None of the report's."""
FROZEN: Final = RECORD / "staleness_frozen.json"
CONFIRM_FROZEN: Final = RECORD / "staleness_confirm_frozen.json"


def main() -> int:
    """Do what was asked; return the exit code."""
    arguments = _arguments()
    out = arguments.out or (_QUICK_OUT if arguments.quick else RECORD)
    out.mkdir(parents=True, exist_ok=True)
    confirms = arguments.command == "confirm"
    frozen = CONFIRM_FROZEN if confirms else FROZEN
    try:
        settings = read_settings(frozen)
        cells = confirming_cells(settings) if confirms else report_cells(settings)
        commit = "" if arguments.quick else freezing_commit(frozen)
    except RefusedError as refusal:
        print(f"staleness: {refusal}", file=sys.stderr)
        return 1
    if arguments.quick:
        cells = [
            replace(cell, seeds=_QUICK_SEEDS, versions=_QUICK_VERSIONS)
            for cell in cells
            if confirms or cell.method in FIRST[:3]
        ]
    results = Results(out / f"staleness_{arguments.command}.jsonl.gz")
    if not arguments.no_runs:
        _fill(cells, results, arguments)
    path = out / ("staleness_confirm.md" if confirms else "staleness.md")
    write = write_confirming_report if confirms else write_report
    write(path, cells, results, commit=commit)
    print(path)
    return 0


def _fill(cells: list[Cell], results: Results, arguments: argparse.Namespace) -> None:
    missing = [cell for cell in cells if cell not in results]
    for number, outcome in enumerate(run_cells(missing, workers=arguments.workers), 1):
        results.add(outcome)
        cell = outcome.cell
        about = f"{cell.task} {cell.method} {cell.delay} {cell.staleness} {cell.mismatch}"
        print(f"{number}/{len(missing)} {about}: {outcome.ends.mean():.3f}", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.staleness", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices=("report", "confirm"))
    parser.add_argument("--quick", action="store_true", help="report on little, in a minute")
    parser.add_argument("--out", type=Path, help=f"folder of results (default {RECORD}, quick: {_QUICK_OUT})")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: cores)")
    parser.add_argument("--no-runs", action="store_true", help="report what is finished, run no cell")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
