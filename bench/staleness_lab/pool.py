"""Cells on as many cores as asked for, one thread and one process each."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache, partial
from pathlib import Path
from typing import Final

import torch

from bench.forked_context import forked_context
from bench.staleness_lab.cells import Cell, Outcome
from bench.staleness_lab.codes import Codes
from bench.staleness_lab.colours import Colours
from bench.staleness_lab.digits import DigitsBandit, cache_digits
from bench.staleness_lab.intervals import Intervals
from bench.staleness_lab.knapsack import Knapsack
from bench.staleness_lab.lander import Lander
from bench.staleness_lab.letters import word_reversal
from bench.staleness_lab.maze import Maze
from bench.staleness_lab.methods import Method
from bench.staleness_lab.palindromes import cache_palindromes, palindrome_generation
from bench.staleness_lab.prices import Prices
from bench.staleness_lab.routes import Routes
from bench.staleness_lab.safes import Safes
from bench.staleness_lab.simulation import simulate
from bench.staleness_lab.sorting import word_sorting
from bench.staleness_lab.tasks import Task
from bench.staleness_lab.unpacking import word_unpacking

TASKS: Final[dict[str, Callable[[Path], Task]]] = {
    "letters": lambda _: word_reversal(),
    "digits": DigitsBandit,
    "codes8": lambda _: Codes(8),
    "codes64": lambda _: Codes(64),
    "codes512": lambda _: Codes(512),
    "reuse": lambda _: Codes(16, groups=16, steps=4),
    "routes": lambda _: Routes(),
    "maze": lambda _: Maze(),
    "knapsack": lambda _: Knapsack(),
    "palindromes": palindrome_generation,
    "safes": lambda _: Safes(),
    "prices": lambda _: Prices(),
    "lander": lambda _: Lander(),
    "sorting": lambda _: word_sorting(),
    "colours": lambda _: Colours(),
    "intervals": lambda _: Intervals(),
    "unpacking": lambda _: word_unpacking(),
}
"""From the folder of cached data."""

_CACHED: Final[dict[str, Callable[[Path], None]]] = {"digits": cache_digits, "palindromes": cache_palindromes}


def cache_data(tasks: Iterable[str], folder: Path) -> None:
    """Write what the tasks read to ``folder``, so that no process needs the packages it comes from.

    Raises:
        ModuleNotFoundError: a file is missing, and so is its package; ``pip install '.[tasks,test]'``.
    """
    for task in tasks:
        if task in _CACHED:
            _CACHED[task](folder)


def run_cells(cells: list[Cell], *, workers: int, data: Path) -> Iterator[Outcome]:
    """Yield the outcome of each cell as it is finished; one worker is this process.

    Ending the iteration early drops what has not begun. What a cell raises is raised here.
    """
    if workers == 1:
        _settle()
        yield from (run_cell(cell, data) for cell in cells)
        return
    with ProcessPoolExecutor(workers, mp_context=forked_context(__name__), initializer=_settle) as pool:
        futures = [pool.submit(partial(run_cell, data=data), cell) for cell in cells]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def run_cell(cell: Cell, data: Path) -> Outcome:
    """Run one cell here and now."""
    return simulate(cell, _task(cell.task, data), Method.named(cell.method, cell.setting.changes))


def _settle() -> None:
    torch.set_num_threads(1)


@cache
def _task(name: str, data: Path) -> Task:
    return TASKS[name](data)
