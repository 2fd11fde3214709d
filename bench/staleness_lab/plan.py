"""Which cells there are: what is tuned on what, which methods reach the report tasks, what they run there.

Design tasks are open to anything: methods are invented, tuned and screened on them. Report tasks are of other
kinds, and no method is tuned on them. The rules below were written before any result was seen.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final

from bench.staleness_lab.cells import Cell, Purpose
from bench.staleness_lab.delays import DELAYS
from bench.staleness_lab.methods import DEFAULT, RECIPES
from bench.staleness_lab.mismatch import MISMATCHES
from bench.staleness_lab.trials import TRIALS, Setting, trials

NAMED: Final = tuple(dict.fromkeys((DEFAULT, "grpo", "gepo", "gspo", "tis", "dppo_tv", "topr", "reinforce")))
"""Methods that run on the report tasks wherever they stand on the design tasks."""

TUNING_STALENESS: Final = (0, 128)


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """How a task is trained."""

    versions: int
    learning_rate: float
    """Base rate that settings multiply: chosen with GRPO on policy, when the task was made, for all."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A laboratory's work."""

    methods: tuple[str, ...]
    named: tuple[str, ...]
    """Methods that are always in the report."""
    screened: int
    """How many more may reach the report tasks: the best on the design tasks."""
    trials: int
    design: Mapping[str, TaskPlan]
    report: Mapping[str, TaskPlan]
    lengths: tuple[str, ...]
    """Design tasks that differ in length only; the report methods run them at the ends of ``staleness``."""
    tuning_seeds: tuple[int, ...]
    seeds: tuple[int, ...]
    staleness: tuple[int, ...]
    """Lags of the fixed delay, ascending; the last is the largest of the other delay models."""
    mismatch_staleness: int
    """Lag of the fixed delay where the sampler's logprobs are off."""

    def tuning(self, method: str) -> list[tuple[Setting, list[Cell]]]:
        """Return the cells of each setting of a method, the published setting first."""
        return [
            (
                setting,
                [
                    self._cell("tune", task, method, setting, "fixed", staleness, "none")
                    for task, staleness in product(self.design, TUNING_STALENESS)
                ],
            )
            for setting in trials(method)[: self.trials]
        ]

    def tuning_cells(self) -> list[Cell]:
        """Return the cells of all methods and settings."""
        return [cell for method in self.methods for _, cells in self.tuning(method) for cell in cells]

    def conditions(self) -> list[tuple[str, int, str]]:
        """Return (delay, staleness, mismatch) of every cell of a report task."""
        fixed = [("fixed", staleness, "none") for staleness in self.staleness]
        others = [(delay, self.staleness[-1], "none") for delay in DELAYS if delay != "fixed"]
        off = [("fixed", self.mismatch_staleness, each) for each in MISMATCHES if each != "none"]
        return fixed + others + off

    def report_cells(self, settings: Mapping[str, Setting]) -> list[Cell]:
        """Return the cells of the report methods, which are the keys of ``settings``; cheap tasks first."""
        cells = [
            self._cell("report", task, method, setting, *condition)
            for task, condition in product(self.report, self.conditions())
            for method, setting in settings.items()
        ]
        ends = (self.staleness[0], self.staleness[-1])
        return cells + [
            self._cell("report", task, method, setting, "fixed", staleness, "none")
            for task, staleness in product(self.lengths, ends)
            for method, setting in settings.items()
        ]

    def _cell(
        self,
        purpose: Purpose,
        task: str,
        method: str,
        setting: Setting,
        delay: str,
        staleness: int,
        mismatch: str,
    ) -> Cell:
        each = self.design[task] if task in self.design else self.report[task]
        return Cell(
            purpose=purpose,
            task=task,
            method=method,
            setting=setting,
            recipe=str(RECIPES[method].changed(setting.changes)),
            delay=delay,
            staleness=staleness,
            mismatch=mismatch,
            learning_rate=each.learning_rate * setting.rate,
            seeds=self.tuning_seeds if purpose == "tune" else self.seeds,
            versions=each.versions,
        )


FULL: Final = Plan(
    methods=tuple(RECIPES),
    named=NAMED,
    screened=10,
    trials=TRIALS,
    design={
        "letters": TaskPlan(versions=400, learning_rate=1e-3),
        "digits": TaskPlan(versions=600, learning_rate=3e-3),
        "codes8": TaskPlan(versions=400, learning_rate=1e-2),
        "codes64": TaskPlan(versions=400, learning_rate=1e-2),
        "codes512": TaskPlan(versions=400, learning_rate=1e-2),
        "reuse": TaskPlan(versions=300, learning_rate=3e-3),
    },
    report={
        "routes": TaskPlan(versions=600, learning_rate=1e-3),
        "maze": TaskPlan(versions=600, learning_rate=1e-3),
        "knapsack": TaskPlan(versions=600, learning_rate=3e-3),
        "palindromes": TaskPlan(versions=500, learning_rate=6e-4),
    },
    lengths=("codes8", "codes64", "codes512"),
    tuning_seeds=(1000, 1001, 1002, 1003),
    seeds=tuple(range(12)),
    staleness=(0, 32, 128, 256),
    mismatch_staleness=32,
)

QUICK: Final = Plan(
    methods=tuple(dict.fromkeys((DEFAULT, "grpo", "reinforce"))),
    named=tuple(dict.fromkeys((DEFAULT, "grpo"))),
    screened=1,
    trials=3,
    design={
        "digits": TaskPlan(versions=200, learning_rate=3e-3),
        "codes8": TaskPlan(versions=200, learning_rate=1e-2),
        "codes64": TaskPlan(versions=200, learning_rate=1e-2),
        "codes512": TaskPlan(versions=60, learning_rate=1e-2),
        "reuse": TaskPlan(versions=100, learning_rate=3e-3),
    },
    report={
        "routes": TaskPlan(versions=150, learning_rate=3e-3),
        "maze": TaskPlan(versions=150, learning_rate=3e-3),
        "palindromes": TaskPlan(versions=60, learning_rate=1e-3),
    },
    lengths=FULL.lengths,
    tuning_seeds=FULL.tuning_seeds[:2],
    seeds=FULL.seeds[:6],
    staleness=(0, 64),
    mismatch_staleness=64,
)
"""A look at the same laboratory in a few minutes; its runs are too short to judge anything."""
