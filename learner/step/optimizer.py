"""AdamW over a policy's parameters, with the settings of a step, and the schedule of its learning rate.

The rate is a function of the version alone, so that a restart goes on exactly. With a warm-up of n steps and
a decay of m it is learner.learning_rate times

    constant   (v + 1) / n below n, then 1
    linear     (v + 1) / n below n, then down to final_lr_share at n + m in equal steps, and there it stays
    cosine     likewise, along half a wave
"""

import math
from typing import Any

import torch

from learner.model.model import Policy
from learner.step_settings import StepSettings


def make_optimizer(policy: Policy, settings: StepSettings | None) -> torch.optim.Optimizer:
    """Return an optimizer of this rank's part of the parameters that has taken no step."""
    arguments = {} if settings is None else _arguments(settings)
    return torch.optim.AdamW(policy.parameters.values(), fused=True, **arguments)


def adopt_settings(optimizer: torch.optim.Optimizer, settings: StepSettings) -> None:
    """Take the following steps with other settings."""
    for group in optimizer.param_groups:
        group.update(_arguments(settings))


def _arguments(settings: StepSettings) -> dict[str, Any]:
    """Return what the optimizer reads of the settings at each step, by its own names."""
    return {"lr": settings.learning_rate, "betas": settings.betas, "weight_decay": settings.weight_decay}


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
