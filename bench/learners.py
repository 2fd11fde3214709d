"""``python -m bench.learners``: several learners beside one on the same groups, and what travels between.

Runs every arm on every task, writes a line an arm to OUT/learners.jsonl, and OUT/learners.md. A run that was
cut off goes on where it was; ``--most 0`` makes the report of what is finished. ``--quick`` does a little of
it, in a minute. What is held constant, and what the numbers mean, is written at the top of the report.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from bench.forked_context import forked_context
from bench.learners_lab.arms import TASKS, Cell, Outcome, arms
from bench.learners_lab.report import write_report
from bench.learners_lab.simulation import simulate
from bench.staleness_lab.pool import TASKS as MAKERS

RECORD: Final = Path(__file__).parent / "results"
"""Where the full tables live."""
SEEDS: Final = tuple(range(40, 46))

_QUICK_OUT: Final = Path("runs/learners-quick")
_QUICK_GROUPS: Final = 512
_QUICK_SEEDS: Final = (0, 1, 2)
"""None of the report's."""


def main() -> int:
    """Do what was asked; return the exit code."""
    arguments = _arguments()
    out = arguments.out or (_QUICK_OUT if arguments.quick else RECORD)
    out.mkdir(parents=True, exist_ok=True)
    lines = out / "learners.jsonl"
    finished = [Outcome.of_line(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    cells = list(quick_cells() if arguments.quick else full_cells())
    known = {outcome.key for outcome in finished}
    missing = [cell for cell in cells if cell.key not in known][: arguments.most]
    for number, outcome in enumerate(_run(missing, workers=arguments.workers), 1):
        with lines.open("a") as file:
            file.write(outcome.to_line() + "\n")
        finished.append(outcome)
        about = f"{outcome.task}, {outcome.learners} learners, {outcome.name}: {outcome.ends.mean():.3f}"
        print(f"{number}/{len(missing)} {about}", file=sys.stderr, flush=True)
    of_cells = {outcome.key: outcome for outcome in finished}
    write_report(out / "learners.md", [of_cells[cell.key] for cell in cells if cell.key in of_cells])
    print(out / "learners.md")
    return 0


def full_cells() -> Iterator[Cell]:
    """Yield every arm on every task whose model has a tensor for each fragment."""
    for task, plan in TASKS.items():
        tensors = len(MAKERS[task]().shapes.named)
        yield from (Cell(task, arm, plan, SEEDS) for arm in arms(plan) if arm.settings.fragments <= tensors)


def quick_cells() -> Iterator[Cell]:
    """Yield the first task's cells with few groups and seeds."""
    first = next(iter(TASKS))
    for cell in full_cells():
        if cell.task == first:
            yield replace(cell, plan=replace(cell.plan, groups=_QUICK_GROUPS), seeds=_QUICK_SEEDS)


def run_cell(cell: Cell) -> Outcome:
    """Run one cell here and now."""
    return simulate(cell, MAKERS[cell.task]())


def _run(cells: list[Cell], *, workers: int) -> Iterator[Outcome]:
    with ProcessPoolExecutor(workers, mp_context=forked_context(__name__), initializer=_settle) as pool:
        futures = [pool.submit(run_cell, cell) for cell in cells]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _settle() -> None:
    torch.set_num_threads(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.learners", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="a little of it, in a minute")
    parser.add_argument("--out", type=Path, help=f"folder of results (default {RECORD}, quick: {_QUICK_OUT})")
    parser.add_argument("--most", type=int, help="cells to run before the report; default: all that are left")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: cores)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
