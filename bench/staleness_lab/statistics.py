"""Numbers from finished cells: where runs end, how far they fell, how fast they learned, what is chance."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from bench.staleness_lab.cells import Floats, Outcome

COLLAPSED_BELOW: Final = 0.8
"""A run has collapsed when it ends below this share of its own best."""

CONFIDENCE: Final = 0.95
LEARNED: Final = 0.8
"""How much of the way from the start to a goal a run has to go to count as having learned."""

_WINDOW: Final = 3
_MOST_PATTERNS: Final = 1 << 13
"""Number of sign flips: all of them up to 13 seeds, then as many drawn at random."""
_LEAST_ERROR: Final = 1e-4
"""Scores are kept to so many digits; a smaller standard error is rounding."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Floats) -> "Estimate":
        """Take one value a seed."""
        return cls(float(values.mean()), float(stats.sem(values)) if len(values) > 1 else float("nan"))


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean difference between two methods on the same seeds, with limits that hold for a whole family."""

    mean: float
    low: float
    high: float
    p: float
    """Corrected for the size of the family."""

    @property
    def verdict(self) -> str:
        """Return ``better``, ``worse``, or ``tied``: the interval holds 0."""
        if self.low > 0:
            return "better"
        return "worse" if self.high < 0 else "tied"


def best_scores(scores: Sequence[Sequence[float]]) -> Floats:
    """Return each seed's best mean of three evaluations in a row, [seeds]; never below its end."""
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(scores, dtype=np.float64), _WINDOW, axis=1)
    best: Floats = windows.mean(axis=2).max(axis=1)
    return best


def collapsed_share(outcome: Outcome) -> float:
    """Return the share of seeds that ended below ``COLLAPSED_BELOW`` of their best."""
    return float((outcome.ends < COLLAPSED_BELOW * best_scores(outcome.scores)).mean())


def versions_to_learn(outcome: Outcome, *, goal: float) -> float:
    """Return the first evaluated version at which the mean score has gone ``LEARNED`` of the way to ``goal``.

    inf if it never has; 0 where the goal is not above the start.
    """
    curve = np.mean(outcome.scores, axis=0)
    reached = np.flatnonzero(curve >= curve[0] + LEARNED * max(0.0, goal - curve[0]))
    at = np.linspace(0, outcome.cell.versions, len(curve))
    return float(at[reached[0]]) if len(reached) else float("inf")


def simultaneous(differences: Floats) -> list[Interval]:
    """Compare many pairs on the same seeds at once, so that all intervals hold together.

    Each interval is mean +- c * standard error; c is the ``CONFIDENCE`` quantile of the largest |t| of the
    family where the signs of whole seeds are drawn at random. p is the share of sign patterns whose largest
    |t| is at least this pair's. Exact where differences are symmetric about 0 over the seeds.

    Args:
        differences: [pairs, seeds]

    Source: Westfall and Young, Resampling-Based Multiple Testing (1993), section 2.
    """
    pairs, seeds = differences.shape
    if pairs == 0:
        return []
    squares = (differences**2).sum(axis=1)

    def largest_t(signs: Floats, axis: int) -> Floats:
        means = np.moveaxis(signs, axis, -1) @ differences.T / seeds
        errors = np.sqrt(np.maximum(squares / seeds - means**2, 0) / (seeds - 1))
        t: Floats = np.abs(means) / np.maximum(errors, _LEAST_ERROR)
        largest: Floats = t.max(axis=-1)
        return largest

    null = stats.permutation_test(
        (np.ones(seeds),),
        largest_t,
        permutation_type="samples",
        n_resamples=_MOST_PATTERNS,
        alternative="greater",
        vectorized=True,
        rng=0,
    ).null_distribution
    critical = float(np.quantile(null, CONFIDENCE))
    means = differences.mean(axis=1)
    errors = np.maximum(stats.sem(differences, axis=1), _LEAST_ERROR)
    return [
        Interval(
            mean=float(mean),
            low=float(mean - critical * error),
            high=float(mean + critical * error),
            p=float(np.mean(null >= abs(mean) / error * (1 - 1e-9))),
        )
        for mean, error in zip(means, errors, strict=True)
    ]
