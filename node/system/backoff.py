"""Pauses between two tries."""

import asyncio
from collections.abc import Callable
from typing import Final

from node.system.waits import wait_at_most

FIRST_BACKOFF_S: Final = 0.2

BACKOFF_CAP_S: Final = 30.0

CONTRIBUTOR_BACKOFF_CAP_S: Final = 4.0
"""Twice this is less than ``learner.merge.restart_wait_s``: a learner that has started deals the groups of
contributors that come later to others, and their steps were in vain."""


class Backoff:
    """Delays that double up to a cap, each drawn between 0 and its ceiling (full jitter)."""

    def __init__(
        self, random: Callable[[], float], *, first_s: float = FIRST_BACKOFF_S, cap_s: float = BACKOFF_CAP_S
    ) -> None:
        """Begin with a ceiling of ``first_s``; ``random`` returns numbers in [0, 1)."""
        self._random = random
        self._first_s = first_s
        self._cap_s = cap_s
        self._ceiling_s = first_s
        self.retries = 0
        """Number of delays drawn."""

    def another(self) -> "Backoff":
        """Return a new one with the same parameters."""
        return Backoff(self._random, first_s=self._first_s, cap_s=self._cap_s)

    def next_s(self) -> float:
        """Draw the next delay, seconds."""
        delay_s = self._random() * self._ceiling_s
        self._ceiling_s = min(2 * self._ceiling_s, self._cap_s)
        self.retries += 1
        return delay_s

    async def wait(self, until: asyncio.Event | None = None) -> None:
        """Wait for the next delay, or until an event if that comes sooner."""
        await wait_at_most(until or asyncio.Event(), self.next_s())

    def reset(self) -> None:
        """Go back to the first ceiling, after a success."""
        self._ceiling_s = self._first_s
