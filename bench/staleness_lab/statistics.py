"""Numbers from finished cells: where runs end, how far they fell, what is chance."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from bench.staleness_lab.cells import Floats, Outcome

COLLAPSED_BELOW: Final = 0.8
"""A run has collapsed when it ends below this share of its own best."""

CONFIDENCE: Final = 0.95
_WINDOW: Final = 3
_MOST_PATTERNS: Final = 1 << 13
"""Number of sign flips: all of them up to 13 seeds, then as many drawn at random."""
_LEAST_ERROR: Final = 1e-4
"""Scores are kept to so many digits; a smaller standard error is rounding."""


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
