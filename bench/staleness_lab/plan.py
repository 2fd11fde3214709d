"""Which cells there are: what is tuned, on what, and what the table then holds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bench.staleness_lab.cells import Cell, Outcome
from bench.staleness_lab.delays import DELAYS
from bench.staleness_lab.methods import RECIPES, described

Floats = NDArray[np.float64]

TUNING_SEEDS: Final = (1000, 1001, 1002, 1003)
TUNING_STALENESS: Final = (0, 32)
"""A learning rate is chosen near the policy and has to hold far from it, as in life."""


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """How long a task is trained, and the learning rates to choose from."""

    versions: int
    rates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A table to be filled."""

    methods: tuple[str, ...]
    tasks: Mapping[str, TaskPlan]
    seeds: tuple[int, ...]
    staleness: tuple[int, ...]
    """Of the fixed delay."""
    random_staleness: tuple[int, ...]
    """Of each of the other delay models."""

    def tuning(self) -> list[Cell]:
        """Give the cells that choose the learning rates."""
        return [
            Cell(
                "tune", task, method, described(method), "fixed", staleness, rate, TUNING_SEEDS, each.versions
            )
            for task, each in self.tasks.items()
            for method in self.methods
            for staleness in TUNING_STALENESS
            for rate in each.rates
        ]

    def table(self, rates: Mapping[tuple[str, str], float]) -> list[Cell]:
        """Give the cells of the table; ``rates`` by task and method."""
        delays = [("fixed", staleness) for staleness in self.staleness]
        delays += [(name, s) for name in DELAYS if name != "fixed" for s in self.random_staleness]
        return [
            Cell(
                "table",
                task,
                method,
                described(method),
                delay,
                staleness,
                rates[task, method],
                self.seeds,
                each.versions,
            )
            for task, each in self.tasks.items()
            for delay, staleness in delays
            for method in self.methods
        ]

    def middle_rates(self) -> dict[tuple[str, str], float]:
        """Give the middle of every grid: what is used where nothing has been tuned."""
        return {
            (task, method): each.rates[len(each.rates) // 2]
            for task, each in self.tasks.items()
            for method in self.methods
        }


FULL: Final = Plan(
    methods=tuple(RECIPES),
    tasks={
        "letters": TaskPlan(versions=1000, rates=(3e-4, 1e-3, 3e-3)),
        "digits": TaskPlan(versions=1500, rates=(1e-3, 3e-3, 1e-2)),
    },
    seeds=tuple(range(8)),
    staleness=(0, 8, 32, 64, 128, 256),
    random_staleness=(64, 256),
)

QUICK: Final = Plan(
    methods=(
        "version_aware",
        "version_aware_kl",
        "gepo",
        "gspo",
        "grpo",
        "importance_sampling",
        "decoupled_ppo",
        "dg",
    ),
    tasks={
        "letters": TaskPlan(versions=500, rates=FULL.tasks["letters"].rates),
        "digits": TaskPlan(versions=900, rates=FULL.tasks["digits"].rates),
    },
    seeds=FULL.seeds,
    staleness=(0, 32, 128),
    random_staleness=(),
)
"""A look at the same laboratory in a few minutes; too short to judge large staleness."""


def chosen_rates(tuned: Iterable[Outcome]) -> dict[tuple[str, str], float]:
    """Give, by task and method, the rate whose runs end best over all tuning staleness and seeds.

    Of equal ones the lowest.
    """
    ends: dict[tuple[str, str], dict[float, list[float]]] = {}
    for outcome in tuned:
        cell = outcome.cell
        by_rate = ends.setdefault((cell.task, cell.method), {})
        by_rate.setdefault(cell.learning_rate, []).append(float(np.mean(last_scores(outcome.scores))))
    return {key: _best_rate(by_rate) for key, by_rate in ends.items()}


def last_scores(scores: Sequence[Sequence[float]]) -> Floats:
    """Give where each seed ends: the mean of its last three evaluations, [seeds]."""
    last: Floats = np.asarray(scores, dtype=np.float64)[:, -3:].mean(axis=1)
    return last


def _best_rate(ends: Mapping[float, Sequence[float]]) -> float:
    mean_ends = {rate: float(np.mean(ends[rate])) for rate in sorted(ends)}
    return max(mean_ends, key=lambda rate: mean_ends[rate])
