"""Which setting of a method is frozen, and which methods are reported, from the tuning runs alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from bench.staleness_lab.cells import Floats
from bench.staleness_lab.plan import Plan
from bench.staleness_lab.results import Results
from bench.staleness_lab.trials import Setting

LEAST_MARGIN: Final = 0.01
"""Scores closer than this, or than their standard error, are not told apart."""


class UnfinishedError(Exception):
    """Tuning cells are missing."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The outcome of tuning one method."""

    setting: Setting
    score: float
    """Mean end over the design tasks, the staleness and the seeds."""
    published: float
    """Score of the published setting."""


def tuned(plan: Plan, results: Results) -> dict[str, Tuned]:
    """Return every method with its chosen setting.

    Raises:
        UnfinishedError: a cell of the tuning plan has not run with the methods as they are now.
    """
    missing = [cell for cell in plan.tuning_cells() if cell not in results]
    if missing:
        names = ", ".join(sorted({cell.method for cell in missing}))
        raise UnfinishedError(
            f"{len(missing)} tuning cells have not run, of {names}: methods that changed are tuned anew; "
            "run `python -m bench.staleness tune`"
        )
    found = {}
    for method in plan.methods:
        scores: list[tuple[Setting, Floats]] = [
            (setting, np.mean([outcome.ends for outcome in results.of(cells)], axis=0))
            for setting, cells in plan.tuning(method)
        ]
        setting, score = chosen(scores)
        found[method] = Tuned(setting, float(score.mean()), published=float(scores[0][1].mean()))
    return found


def chosen(scores: Sequence[tuple[Setting, Floats]]) -> tuple[Setting, Floats]:
    """Return the first setting that is not told apart from the best: the one nearest to the published.

    Args:
        scores: settings, and the mean end of each seed, [seeds]; the fewest changes first.

    Raises:
        StopIteration: there is none.
    """
    _, best = max(scores, key=lambda one: float(one[1].mean()))
    return next((setting, each) for setting, each in scores if _is_level(best - each))


def _is_level(behind: Floats) -> bool:
    """Return whether a score this far behind, [seeds], is not told apart."""
    error = float(stats.sem(behind)) if len(behind) > 1 else 0.0
    return bool(behind.mean() <= max(LEAST_MARGIN, error))


def screened(plan: Plan, found: Mapping[str, Tuned]) -> list[str]:
    """Return the methods of the report: the named ones, then the best others on the design tasks."""
    named = [method for method in plan.named if method in found]
    others = by_score({method: each for method, each in found.items() if method not in named})
    return named + others[: plan.screened]


def by_score(found: Mapping[str, Tuned]) -> list[str]:
    """Return the methods, the best first."""
    return sorted(found, key=lambda method: found[method].score, reverse=True)
