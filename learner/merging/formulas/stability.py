r"""Stability: which outer rates converge where changes are merged late, and whether a run does.

On a quadratic whose optimum is 0, the local steps of a round go the part c, the contraction, of the way to
it: c = 1 - (1 - eta lambda)^H. With identical contributors, round t has

    D_t     = c r_t                            r_t: the masters that the steps of round t began from
    m_t     = beta m_{t-1} + D_t
    theta_t = theta_{t-1} - gamma (D_t + beta m_t)

    wait        r_t = theta_{t-1}
    delayed     r_t = theta_{t-2}
    eager       r_t = theta_{t-2} - D_{t-1}    its own steps are kept until they are merged (``overlap``)
    own share   r_t = s theta_{t-1} + (1 - s) theta_{t-2}      eager updates, arXiv:2502.12996, s = 1/M

which converges where every eigenvalue of the map of (theta_{t-1}, theta_{t-2}, m_{t-1}, D_{t-1}) is at most 1
in size. The largest stable gamma at c = 1, and the largest stable c at gamma .7:

    beta   wait    delayed   eager   own share 1/2, 1/4, 1/8  |  wait    delayed  eager  1/2, 1/4, 1/8
    .9     1.357    .253     1.086   .769, .415, .320         |  1       .361     1      1, .594, .457
    .5     1.5      .561     1.372   1.186, .765, .648        |  1       .802     1      1, 1, .926
    0      2       1         2       2, 1.333, 1.143          |  1      1         1      1, 1, 1
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Final, Literal

import numpy as np

Overlap = Literal["wait", "eager", "delayed"]

LARGEST_RATE: Final = 4.0
"""No rate above it is stable at contraction 1."""
LEAST_RATE: Final = 1 / 16
"""A run that diverges at this one needs other steps, or an older version."""
_HALVINGS: Final = 40
_ROUNDING: Final = 1e-6
"""A double eigenvalue of size 1 is computed to about the root of the float's precision."""
_SHORTEST: Final = 4
"""Rounds of a window."""
_WINDOWS: Final = 4
NORMS_KEPT: Final = 64 * _WINDOWS
"""Newest norms that say whether they grow."""
_GROWTH: Final = 2.0


def largest_stable_rate(
    beta: float, *, overlap: Overlap, contraction: float = 1.0, own_share: float | None = None
) -> float:
    """Return the largest gamma, at most ``LARGEST_RATE``, up to which rounds converge.

    Args:
        beta: outer momentum, in [0, 1).
        overlap: as above.
        contraction: c, in (0, 1].
        own_share: s, in [0, 1], of the published eager updates, instead of ``overlap``.
    """

    def is_stable(rate: float) -> bool:
        return _radius(rate, beta, contraction, overlap, own_share) <= 1 + _ROUNDING

    return _largest(is_stable, LARGEST_RATE)


def largest_stable_contraction(
    rate: float, beta: float, *, overlap: Overlap, own_share: float | None = None
) -> float:
    """Return the largest c, at most 1, up to which rounds converge at a rate; as ``largest_stable_rate``."""

    def is_stable(contraction: float) -> bool:
        return _radius(rate, beta, contraction, overlap, own_share) <= 1 + _ROUNDING

    return _largest(is_stable, 1.0)


def _radius(rate: float, beta: float, contraction: float, overlap: Overlap, own_share: float | None) -> float:
    """Return the size of the largest eigenvalue of a round."""
    newest, before, memory, last = np.eye(4)
    read = {"wait": newest, "delayed": before, "eager": before - last}[overlap]
    if own_share is not None:
        read = own_share * newest + (1 - own_share) * before
    towards = contraction * read
    memory = beta * memory + towards
    theta = newest - rate * (towards + beta * memory)
    return float(np.abs(np.linalg.eigvals(np.stack([theta, newest, memory, towards]))).max())


def _largest(is_stable: Callable[[float], bool], most: float) -> float:
    """Return where stability ends in (0, most], by halving."""
    if is_stable(most):
        return most
    low, high = 0.0, most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_stable(middle) else (low, middle)
    return low


def lowered_rate(rate: float, beta: float, *, overlap: Overlap) -> float:
    """Return the gamma, for beta 0, that a run which diverges goes on with; never below ``LEAST_RATE``.

    Half of what its versions took over in the end, gamma / (1 - beta), and at most half of the largest gamma
    that is stable for beta 0: 1 where a merge is waited for or eager, .5 where it is delayed. Where that
    diverges, too, the local steps of a round go beyond the optimum, c > 1, and a gamma of 1 / c or less
    converges: half of it, again, gets there.
    """
    in_the_end = rate / (1 - beta)
    return max(LEAST_RATE, min(in_the_end, largest_stable_rate(0.0, overlap=overlap)) / 2)


def grows(norms: Sequence[float]) -> bool:
    """Whether norms of mean changes, a round each, the newest last, grow as in divergence.

    Rounds are taken in windows of 4, 8, 16, ... up to 64. It is divergence where the median of a window has
    doubled three times running, at one of these lengths. Divergence doubles at every window that is long
    enough. A warm-up does not, whatever its length: a linear one goes x 3, 1.7, 1.4 and a quadratic one x 9,
    2.8, 1.96. Norms that vary by a factor e^.5 from round to round would do it once in millions of rounds.
    """
    length = _SHORTEST
    while length * _WINDOWS <= min(len(norms), NORMS_KEPT):
        first = len(norms) - length * _WINDOWS
        medians = [median(norms[first + i * length :][:length]) for i in range(_WINDOWS)]
        if all(after >= _GROWTH * before > 0 for before, after in pairwise(medians)):
            return True
        length *= 2
    return False
