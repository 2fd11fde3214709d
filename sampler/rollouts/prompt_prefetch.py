"""How many prompts to have ready beyond those being sampled; pure.

A place in the engine that falls free should find its next prompt there. While a group takes ``group_s``,
``concurrency * prompt_s / group_s`` places fall free in the time one prompt takes (Little's law): so many are
fetched ahead, and none where prompts come at once, because a lease that waits is one that nobody else has.
"""

from typing import Final

SMOOTHING: Final = 0.2
"""Weight of the newest time in the running means: some five groups are remembered."""


class Prefetch:
    """Learns how long prompts and groups take."""

    def __init__(self) -> None:
        self._prompt_s: float | None = None
        self._group_s: float | None = None

    def note_prompt(self, seconds: float) -> None:
        """Note the time from a lease to its prompt."""
        self._prompt_s = _mean(self._prompt_s, max(0.0, seconds))

    def note_group(self, seconds: float) -> None:
        """Note the time a group was generated in."""
        self._group_s = _mean(self._group_s, max(0.0, seconds))

    def ahead(self, concurrency: int) -> int:
        """Return how many prompts to fetch ahead, at most ``concurrency``; 0 before the first group."""
        if self._prompt_s is None or self._group_s is None:
            return 0
        if self._group_s <= 0:
            return concurrency if self._prompt_s > 0 else 0
        return min(concurrency, int(concurrency * self._prompt_s / self._group_s + 0.5))


def _mean(mean: float | None, newest: float) -> float:
    return newest if mean is None else mean + SMOOTHING * (newest - mean)
