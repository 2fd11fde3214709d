"""Cells on as many cores as asked for, one thread and one process each."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from typing import Final

import torch

from bench.forked_context import forked_context
from bench.staleness_lab.cells import Cell, Outcome
from bench.staleness_lab.colours import Colours
from bench.staleness_lab.intervals import Intervals
from bench.staleness_lab.lander import Lander
from bench.staleness_lab.methods import Method
from bench.staleness_lab.prices import Prices
from bench.staleness_lab.safes import Safes
from bench.staleness_lab.simulation import simulate
from bench.staleness_lab.sorting import word_sorting
from bench.staleness_lab.tasks import Task
from bench.staleness_lab.unpacking import word_unpacking

TASKS: Final[dict[str, Callable[[], Task]]] = {
    "safes": Safes,
    "prices": Prices,
    "lander": Lander,
    "sorting": word_sorting,
    "colours": Colours,
    "intervals": Intervals,
    "unpacking": word_unpacking,
}


def run_cells(cells: list[Cell], *, workers: int) -> Iterator[Outcome]:
    """Yield the outcome of each cell as it is finished; one worker is this process.

    Ending the iteration early drops what has not begun. What a cell raises is raised here.
    """
    if workers == 1:
        _settle()
        yield from map(run_cell, cells)
        return
    with ProcessPoolExecutor(workers, mp_context=forked_context(__name__), initializer=_settle) as pool:
        futures = [pool.submit(run_cell, cell) for cell in cells]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def run_cell(cell: Cell) -> Outcome:
    """Run one cell here and now."""
    return simulate(cell, _task(cell.task), Method.named(cell.method, cell.setting.changes))


def _settle() -> None:
    torch.set_num_threads(1)


@cache
def _task(name: str) -> Task:
    return TASKS[name]()
