"""AdamW over a policy's parameters, with the settings of a step."""

from typing import Any

import torch

from learner.step_settings import StepSettings
from learner.training.model import Policy


def make_optimizer(policy: Policy, settings: StepSettings) -> torch.optim.Optimizer:
    """Return an optimizer of this rank's part of the parameters that has taken no step."""
    return torch.optim.AdamW(policy.parameters.values(), fused=True, **_arguments(settings))


def adopt_settings(optimizer: torch.optim.Optimizer, settings: StepSettings) -> None:
    """Take the following steps with other settings."""
    for group in optimizer.param_groups:
        group.update(_arguments(settings))


def _arguments(settings: StepSettings) -> dict[str, Any]:
    """Return what the optimizer reads of the settings at each step, by its own names."""
    return {"lr": settings.learning_rate, "betas": settings.betas, "weight_decay": settings.weight_decay}
