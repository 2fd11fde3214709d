"""How old a group is when it is trained on, in versions, for each group of each step.

A sampler's behaviour policy is the learner of ``lag`` versions ago. ``staleness`` is the lag itself
(fixed), of every other group, the rest being fresh (humps), or the most it can be (the others); a run's
first versions have nothing older than version 0.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

_LOWER_S: Final = 60.0
_UPPER_S: Final = 1920.0
"""The times between refreshes that the two continuous models cover with 99.5 % of their mass;
``_UPPER_S`` stands for ``staleness`` versions."""

_LOG_MEAN: Final = 5.82721
_LOG_DEVIATION: Final = 0.61733
_WEIBULL_SHAPE: Final = 2.2450
_WEIBULL_SCALE_S: Final = 864.89


def lags(delay: str, *, staleness: int, versions: int, groups: int, seed: int) -> NDArray[np.int64]:
    """Return the lag of every group, [versions, groups], 0 <= lag <= min(staleness, version).

    Args:
        delay: key of ``DELAYS``.
        staleness: the largest lag, in versions.
        versions: steps of the run.
        groups: groups a step.
        seed: of this run; the same lags for every method.
    """
    drawn = DELAYS[delay](np.random.default_rng([seed, staleness]), staleness, (versions, groups))
    return np.minimum(drawn, np.arange(versions)[:, None])


def _fixed(_: np.random.Generator, staleness: int, shape: tuple[int, int]) -> NDArray[np.int64]:
    return np.full(shape, staleness, dtype=np.int64)


def _uniform(rng: np.random.Generator, staleness: int, shape: tuple[int, int]) -> NDArray[np.int64]:
    return rng.integers(0, staleness, size=shape, endpoint=True)


def _lognormal(rng: np.random.Generator, staleness: int, shape: tuple[int, int]) -> NDArray[np.int64]:
    return _in_versions(rng.lognormal(_LOG_MEAN, _LOG_DEVIATION, size=shape), staleness)


def _weibull(rng: np.random.Generator, staleness: int, shape: tuple[int, int]) -> NDArray[np.int64]:
    return _in_versions(_WEIBULL_SCALE_S * rng.weibull(_WEIBULL_SHAPE, size=shape), staleness)


def _humps(_: np.random.Generator, staleness: int, shape: tuple[int, int]) -> NDArray[np.int64]:
    return np.broadcast_to(staleness * (np.arange(shape[1]) % 2), shape)


def _in_versions(seconds: NDArray[np.float64], staleness: int) -> NDArray[np.int64]:
    share = np.clip(seconds, _LOWER_S, _UPPER_S) / _UPPER_S
    return np.rint(share * staleness).astype(np.int64)


DELAYS: Final[dict[str, Callable[[np.random.Generator, int, tuple[int, int]], NDArray[np.int64]]]] = {
    "fixed": _fixed,
    "uniform": _uniform,
    "lognormal": _lognormal,
    "weibull": _weibull,
    "humps": _humps,
}
