"""How many prompts to prepare beyond those being sampled; pure.

When a place in the engine becomes free, its next prompt should be ready. While a group takes ``group_s``,
``concurrency * prompt_s / group_s`` places become free in the time one prompt takes (Little's law): that many
prompts are prepared ahead. None are where prompts are instant: nobody else can have a lease that waits here.
"""

from typing import Final

SMOOTHING: Final = 0.2
"""Weight of the newest time in the running means, which then remember about five groups."""


class PromptPrefetch:
    """Running means of how long prompts and groups take, and what follows from them."""

    def __init__(self) -> None:
        self._prompt_s: float | None = None
        self._group_s: float | None = None

    def note_prompt(self, seconds: float) -> None:
        """Note the time from a lease to its prompt."""
        self._prompt_s = _mean(self._prompt_s, max(0.0, seconds))

    def note_group(self, seconds: float) -> None:
        """Note the time it took to generate a group."""
        self._group_s = _mean(self._group_s, max(0.0, seconds))

    def ahead(self, concurrency: int) -> int:
        """Return how many prompts to prepare ahead, at most ``concurrency``; 0 before the first group."""
        if self._prompt_s is None or self._group_s is None:
            return 0
        if self._group_s <= 0:
            return concurrency if self._prompt_s > 0 else 0
        return min(concurrency, int(concurrency * self._prompt_s / self._group_s + 0.5))


def _mean(mean: float | None, newest: float) -> float:
    return newest if mean is None else mean + SMOOTHING * (newest - mean)
