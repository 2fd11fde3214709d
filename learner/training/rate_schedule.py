"""The learning rate by version; pure, so that a restart goes on exactly.

The share of learner.learning_rate, with a warm-up of n steps and a decay of m:

    constant   (v + 1) / n below n, then 1
    linear     (v + 1) / n below n, then down to final_share at n + m in equal steps, and there it stays
    cosine     likewise, along half a wave
"""

import math
from dataclasses import dataclass
from typing import Literal

ScheduleShape = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class RateSchedule:
    """A learning rate's share of its peak; fields as in LearnerConfig."""

    shape: ScheduleShape = "constant"
    warmup_steps: int = 0
    decay_steps: int = 0
    """At least 1 unless constant."""
    final_share: float = 0.0

    def share(self, version: int) -> float:
        """Return the share, in [0, 1], for the step that starts from ``version``.

        The first step of a warm-up of n has 1/n, the n-th has 1. The step after ``decay_steps`` more has
        ``final_share``, and so have all later ones.
        """
        if version < self.warmup_steps:
            return (version + 1) / self.warmup_steps
        if self.shape == "constant":
            return 1.0
        progress = min(1.0, (version - self.warmup_steps) / self.decay_steps)
        left = 1 - progress if self.shape == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.final_share + (1 - self.final_share) * left
