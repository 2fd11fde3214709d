"""``python -m bench.staleness``: which objective still learns from completions of old policies.

    tune: a learning rate for every method and task --> table: methods x staleness x delay models
    --> OUT/staleness.jsonl (a line a finished cell; a killed run goes on) --> OUT/staleness.md, .png

``--quick`` looks at eight methods in a few minutes. What is held constant, and what the numbers
mean, is written at the top of the report.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from bench.staleness_lab.cells import Cell, Outcome
from bench.staleness_lab.digits import cache_digits
from bench.staleness_lab.plan import FULL, QUICK, Plan, chosen_rates, last_scores
from bench.staleness_lab.pool import run_cells
from bench.staleness_lab.report import write_report
from bench.staleness_lab.results import Results

RECORD: Final = Path(__file__).parent / "results"
"""Where the full table lives."""

_QUICK_OUT: Final = Path("runs/staleness-quick")
_DIGITS: Final = Path("runs/digits.npz")
_RESULTS: Final = "staleness.jsonl"


def main() -> int:
    """Fill the table and write the report; gives the exit code."""
    arguments = _arguments()
    plan = _plan(arguments)
    out = arguments.out or (_QUICK_OUT if arguments.quick else RECORD)
    results = Results(out / _RESULTS)
    cache_digits(arguments.digits)
    if arguments.quick:
        rates = _recorded_rates(plan)
    else:
        tuning = plan.tuning()
        if not arguments.report_only:
            _fill(tuning, results, arguments)
        rates = plan.middle_rates() | chosen_rates(results.of(tuning))
    cells = plan.table(rates)
    if not arguments.report_only:
        _fill(cells, results, arguments)
    write_report(out, plan, results.of(cells), tuned=results.of(plan.tuning()))
    print(f"{len(results.of(cells))} of {len(cells)} cells: {out / 'staleness.md'}")
    return 0


def _recorded_rates(plan: Plan) -> Mapping[tuple[str, str], float]:
    """Give the rates of the full table as far as it was tuned: a quick look tunes nothing."""
    return plan.middle_rates() | chosen_rates(Results(RECORD / _RESULTS).of(FULL.tuning()))


def _fill(cells: list[Cell], results: Results, arguments: argparse.Namespace) -> None:
    missing = [cell for cell in cells if cell not in results]
    for done, outcome in enumerate(
        run_cells(missing, workers=arguments.workers, digits=arguments.digits), start=1
    ):
        results.add(outcome)
        print(f"[{done}/{len(missing)}] {_line(outcome)}", file=sys.stderr, flush=True)


def _line(outcome: Outcome) -> str:
    cell = outcome.cell
    return (
        f"{cell.purpose} {cell.task} {cell.method} {cell.delay} {cell.staleness} lr {cell.learning_rate:g}: "
        f"{last_scores(outcome.scores).mean():.4f} in {outcome.seconds:.1f} s"
    )


def _plan(arguments: argparse.Namespace) -> Plan:
    plan = QUICK if arguments.quick else FULL
    if arguments.methods:
        plan = replace(plan, methods=tuple(arguments.methods.split(",")))
    if arguments.tasks:
        plan = replace(plan, tasks={name: plan.tasks[name] for name in arguments.tasks.split(",")})
    return plan


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.staleness", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="eight methods, fixed delay, minutes")
    parser.add_argument("--out", type=Path, help=f"folder of results (default {RECORD}, quick: {_QUICK_OUT})")
    parser.add_argument(
        "--digits", type=Path, default=_DIGITS, help="scikit-learn's digits as .npz; made if it is missing"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: cores)")
    parser.add_argument("--methods", help="only these, separated by commas")
    parser.add_argument("--tasks", help="only these, separated by commas")
    parser.add_argument("--report-only", action="store_true", help="run nothing, report what is finished")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
