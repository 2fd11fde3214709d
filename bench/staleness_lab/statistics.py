"""Numbers from finished cells: where runs end, how far they fell, what is chance."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from bench.staleness_lab.cells import Outcome
from bench.staleness_lab.plan import Floats, last_scores

COLLAPSED_BELOW: Final = 0.8
"""A run has collapsed when it ends below this share of its own best."""

_SIGNIFICANT: Final = 0.05
_WINDOW: Final = 3


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Floats) -> "Estimate":
        """Take one value a seed."""
        error = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")
        return cls(float(values.mean()), error)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A method against another on the same seeds, prompts and lags."""

    difference: Estimate
    p: float

    @property
    def is_significant(self) -> bool:
        """Two-sided, at 5 %, not corrected for how many are compared."""
        return self.p <= _SIGNIFICANT


def best_scores(scores: Sequence[Sequence[float]]) -> Floats:
    """Give each seed's best mean of three evaluations in a row, [seeds]; never below ``last_scores``."""
    curves = np.asarray(scores, dtype=np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(curves, _WINDOW, axis=1)
    best: Floats = windows.mean(axis=2).max(axis=1)
    return best


def gaps(outcome: Outcome) -> Floats:
    """Give best minus last of each seed, [seeds]."""
    return best_scores(outcome.scores) - last_scores(outcome.scores)


def collapsed_share(outcome: Outcome) -> float:
    """Give the share of seeds that ended below ``COLLAPSED_BELOW`` of their best."""
    return float((last_scores(outcome.scores) < COLLAPSED_BELOW * best_scores(outcome.scores)).mean())


def mean_measure(outcome: Outcome, name: str) -> float:
    """Give a measure's mean over the run; nan where any tenth was not finite."""
    return float(np.mean([np.nan if value is None else value for value in outcome.measures[name]]))


def comparison(ours: Floats, theirs: Floats) -> Comparison:
    """Compare seed by seed. p: share of all sign patterns whose mean difference is as far from 0.

    Exact for a difference that is symmetric about 0; with 8 seeds the smallest p is 2/256.
    """
    difference = ours - theirs
    signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(difference))))
    means = np.abs(signs @ difference)
    p = float((means >= np.abs(difference.sum()) - 1e-12).mean())
    return Comparison(Estimate.of(difference), p)


def rank_correlation(x: Iterable[float], y: Iterable[float]) -> float:
    """Give Spearman's coefficient over the pairs that are finite; nan for fewer than 3 or a constant."""
    pairs = np.array([pair for pair in zip(x, y, strict=True) if np.isfinite(pair).all()])
    if len(pairs) < 3:
        return float("nan")
    ranks = [_ranks(pairs[:, column]) for column in (0, 1)]
    if any(np.ptp(column) == 0 for column in ranks):
        return float("nan")
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: Floats) -> Floats:
    """Ranks from 0; equal values share their mean rank."""
    _, index, count = np.unique(values, return_inverse=True, return_counts=True)
    first = np.cumsum(count) - count
    ranks: Floats = (first + (count - 1) / 2)[index]
    return ranks


@dataclass(frozen=True, slots=True)
class Table:
    """Finished cells by what they are."""

    cells: dict[tuple[str, str, str, int], Outcome]
    """(task, method, delay, staleness) -> outcome."""

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> "Table":
        """Take the outcomes of one plan."""
        return cls({(o.cell.task, o.cell.method, o.cell.delay, o.cell.staleness): o for o in outcomes})

    def get(self, task: str, method: str, staleness: int, delay: str = "fixed") -> Outcome | None:
        """Give a cell, or None if it is not finished."""
        return self.cells.get((task, method, delay if staleness else "fixed", staleness))

    def methods(self, task: str, staleness: int) -> dict[str, Outcome]:
        """Give every method's cell at a fixed staleness."""
        return {
            method: outcome
            for (each, method, delay, age), outcome in self.cells.items()
            if (each, delay, age) == (task, "fixed", staleness)
        }

    def fixed(self, task: str) -> list[Outcome]:
        """Give every cell of a task with the fixed delay."""
        return [o for (each, _, delay, _), o in self.cells.items() if (each, delay) == (task, "fixed")]

    def retained(self, task: str, method: str, staleness: int, *, of: str) -> Estimate | None:
        """Give the end score over that of method ``of`` on policy, seed by seed.

        None: not measured, or a run on policy collapsed and left nothing to retain.
        """
        late, fresh = self.get(task, method, staleness), self.get(task, of, 0)
        if late is None or fresh is None or collapsed_share(fresh) > 0:
            return None
        return Estimate.of(last_scores(late.scores) / last_scores(fresh.scores))

    def best_method(self, task: str, staleness: int) -> str | None:
        """Give the method that ends best on the mean of the seeds."""
        ends = {m: float(last_scores(o.scores).mean()) for m, o in self.methods(task, staleness).items()}
        return max(ends, key=lambda method: ends[method]) if ends else None
