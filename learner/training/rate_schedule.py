"""The learning rate by version; pure, so that a restart goes on exactly.

The share of learner.learning_rate, with a warm-up of n steps and a decay of m:

    constant   (v + 1) / n below n, then 1
    linear     (v + 1) / n below n, then down to final_lr_share at n + m in equal steps, and there it stays
    cosine     likewise, along half a wave
"""

import math

from learner.step_settings import StepSettings


def rate_share(settings: StepSettings, version: int) -> float:
    """Return the share of the peak rate, in [0, 1], for the step that starts from ``version``.

    The first step of a warm-up of n has 1/n, the n-th has 1. The step after ``decay_steps`` more has
    ``final_lr_share``, and so have all later ones.
    """
    if version < settings.warmup_steps:
        return (version + 1) / settings.warmup_steps
    if settings.lr_schedule == "constant":
        return 1.0
    progress = min(1.0, (version - settings.warmup_steps) / settings.decay_steps)
    left = 1 - progress if settings.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return settings.final_lr_share + (1 - settings.final_lr_share) * left
