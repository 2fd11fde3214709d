"""Whether long groups are trained on as often as short ones; pure.

A policy that learns only from what arrives soon learns to be short. A group's size in bytes stands for its
length: both grow with its tokens.
"""

from collections import deque
from typing import Final

import numpy as np

WINDOW_GROUPS: Final = 2048
LEAST_GROUPS: Final = 256
"""Fewer say nothing: among so many, chance alone makes a distance of .05 where a quarter was not used."""


class LengthBalance:
    """The newest groups that left the spool, used or not; in memory only."""

    def __init__(self) -> None:
        self._newest: deque[tuple[int, bool]] = deque(maxlen=WINDOW_GROUPS)

    def note(self, size_bytes: int, *, is_used: bool) -> None:
        """Note a group that a batch consumed, or that came to nothing."""
        self._newest.append((size_bytes, is_used))

    def distance(self) -> float | None:
        """Return the Kolmogorov-Smirnov distance between sizes handed in and sizes used, 0 to 1.

        None: too few groups left the spool since the start. 1: none was used.
        """
        if len(self._newest) < LEAST_GROUPS:
            return None
        sizes, is_used = map(np.array, zip(*self._newest, strict=True))
        used = np.sort(sizes[is_used])
        if not len(used):
            return 1.0
        steps = np.unique(sizes)
        of_used = np.searchsorted(used, steps, side="right") / len(used)
        of_all = np.searchsorted(np.sort(sizes), steps, side="right") / len(sizes)
        return float(np.abs(of_used - of_all).max())
