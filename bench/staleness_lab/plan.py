"""Which cells there are, in the order in which they run; all of it written before any report task had run
off policy.

Report tasks are newer than every objective compared. Their versions and learning rates were chosen with
GRPO, with fresh groups, on seeds 1000 and 1001; the code was tried on the first 30 versions of three
methods on seeds 0 to 2. The report has neither.

What the report decides: ``plain`` is the default unless ``former``, or a former with a part out, is better
by an interval in more of the cells below than it is worse; what it has beyond ``plain`` goes. ``plain,
weighs completions`` takes the place of ``plain`` if it is better by an interval in a cell of two humps and
worse in none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bench.staleness_lab.cells import Cell, Setting
from bench.staleness_lab.methods import RECIPES

CANDIDATE: Final = "plain"
"""The form with which the rule compares all others."""

SHIPPED: Final = "plain, weighs completions"
"""The form that it chose: the menu's ``drift_aware``."""


@dataclass(frozen=True, slots=True)
class Row:
    """How completions come about."""

    delay: str
    staleness: int
    """Versions; see ``delays``."""
    mismatch: str = "none"

    def __str__(self) -> str:
        """Write the row as it stands in tables."""
        age = f"half fresh, half {self.staleness}" if self.delay == "humps" else f"lag {self.staleness}"
        return age if self.mismatch == "none" else f"{age}, {self.mismatch}"


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """How a task is trained."""

    versions: int
    learning_rate: float
    """Base rate that settings multiply."""
    seeds: tuple[int, ...]


HUMPS: Final = Row("humps", 400)
FLIPPED: Final = Row("fixed", 128, "flipped")
OLD: Final = Row("fixed", 256)
SAMPLERS: Final = Row("fixed", 128, "samplers")
LATE: Final = Row("fixed", 64)
QUANTISED: Final = Row("fixed", 0, "quantised")
FRESH: Final = Row("fixed", 0)
MODEL_HUMPS: Final = Row("humps", 128)
MODEL_FLIPPED: Final = Row("fixed", 64, "flipped")
"""Rows of the language model, whose runs are shorter."""

REPORT: Final[Mapping[str, TaskPlan]] = {
    "safes": TaskPlan(800, 1e-2, tuple(range(20, 32))),
    "prices": TaskPlan(800, 1e-2, tuple(range(20, 32))),
    "lander": TaskPlan(600, 3e-3, tuple(range(20, 28))),
    "sorting": TaskPlan(300, 1e-3, tuple(range(20, 26))),
}

FIRST: Final = (
    "plain",
    "former",
    "grpo",
    "gspo",
    "mis_geometric",
    "m2po",
    "vcpo",
    "drpo",
    "dppo_tv",
    "tis",
    "topr",
    "gepo",
    "plain, weighs completions",
    "plain, leaves nothing alone",
    "former, supposed",
    "former, without q/E",
    "former, without f",
)
"""Methods that run before the others, in this order."""

WAVES: Final[tuple[tuple[tuple[str, ...], tuple[Row, ...], bool], ...]] = (
    (("safes", "prices", "lander"), (HUMPS, FLIPPED, OLD), True),
    (("sorting",), (MODEL_HUMPS, MODEL_FLIPPED), True),
    (("safes", "prices", "lander"), (SAMPLERS, LATE, QUANTISED, FRESH), True),
    (("safes", "prices", "lander"), (HUMPS, FLIPPED, OLD, SAMPLERS, LATE, QUANTISED, FRESH), False),
    (("sorting",), (LATE,), True),
    (("sorting",), (MODEL_HUMPS, MODEL_FLIPPED, LATE), False),
)
"""Tasks and rows in the order in which they run, of the methods of ``FIRST`` or of the others."""


def report_cells(settings: Mapping[str, Setting]) -> list[Cell]:
    """Return the cells of the report in the order in which they run; ``settings`` by method."""
    others = [method for method in settings if method not in FIRST]
    return [
        cell_of(task, REPORT[task], row, method, settings[method])
        for tasks, rows, is_first in WAVES
        for row in rows
        for task in tasks
        for method in (FIRST if is_first else others)
    ]


def cell_of(task: str, plan: TaskPlan, row: Row, method: str, setting: Setting) -> Cell:
    """Return the cell of a method in a row of a task."""
    return Cell(
        task=task,
        method=method,
        setting=setting,
        recipe=str(RECIPES[method].changed(setting.changes)),
        delay=row.delay,
        staleness=row.staleness,
        mismatch=row.mismatch,
        learning_rate=plan.learning_rate * setting.rate,
        seeds=plan.seeds,
        versions=plan.versions,
    )
