"""How much of what arrives teaches anything; pure.

A group whose completions all have the same reward has no advantage: the learner consumes it and learns
nothing. Where that is so of whole batches no step is taken, and an operator has to hear of it, because KL and
effective sample size look healthy.
"""

from collections import deque
from typing import Final

from node.run import Teaching

BATCHES: Final = 64
"""Newest batches that count: a share of one batch of a few groups jumps."""


class TeachingRecord:
    """The newest batches of this process."""

    def __init__(self, *, now: float) -> None:
        self._batches: deque[tuple[int, int]] = deque(maxlen=BATCHES)
        self._taught_at_s = now
        self._reward_mean = 0.0
        self.idle_batches = 0
        """In a row, that taught nothing."""

    def add(self, *, groups: int, teaching_groups: int, reward_mean: float, now: float) -> None:
        """Note a batch; ``now`` in monotonic seconds."""
        self._batches.append((groups, groups - teaching_groups))
        self._reward_mean = reward_mean
        self.idle_batches = 0 if teaching_groups else self.idle_batches + 1
        if teaching_groups:
            self._taught_at_s = now

    def report(self, *, now: float) -> Teaching | None:
        """Return what the newest batches taught; None before the first."""
        if not self._batches:
            return None
        groups, uninformative = map(sum, zip(*self._batches, strict=True))
        idle_s = now - self._taught_at_s if self.idle_batches else 0.0
        return Teaching(groups, uninformative, self._reward_mean, idle_s)
