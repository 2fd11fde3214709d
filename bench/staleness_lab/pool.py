"""Cells on all cores, one thread and one process each, polite to whatever else runs here."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Final

import torch

from bench.staleness_lab.cells import Cell, Outcome
from bench.staleness_lab.digits import DigitsBandit
from bench.staleness_lab.letters import WordReversal
from bench.staleness_lab.methods import Method
from bench.staleness_lab.simulation import simulate
from bench.staleness_lab.tasks import Task

_NICENESS: Final = 10

TASKS: Final[dict[str, Callable[[Path], Task]]] = {
    "digits": DigitsBandit,
    "letters": lambda _: WordReversal(),
}


def run_cells(cells: list[Cell], *, workers: int, digits: Path) -> Iterator[Outcome]:
    """Give the outcome of each cell as it is finished.

    Ending the iteration early drops what has not begun. What a cell raises is raised here.
    """
    spawn = multiprocessing.get_context("spawn")  # a forked torch may wait for threads that are not there
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_settle) as pool:
        futures = [pool.submit(run_cell, cell, digits) for cell in cells]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def run_cell(cell: Cell, digits: Path) -> Outcome:
    """Run one cell here and now."""
    return simulate(cell, _task(cell.task, digits), Method.named(cell.method))


def _settle() -> None:
    os.nice(_NICENESS)
    torch.set_num_threads(1)


@cache
def _task(name: str, digits: Path) -> Task:
    return TASKS[name](digits)
