"""The loss of a completion, given its weight and its advantage."""

from typing import NamedTuple

import torch
from torch import Tensor


class Surrogate(NamedTuple):
    """What ``clipped_surrogate`` gives; both [completions]."""

    loss: Tensor
    is_clipped: Tensor
    """bool; where True the loss has no gradient."""


def clipped_surrogate(weight: Tensor, advantage: Tensor, *, clip_epsilon: float) -> Surrogate:
    """Give -min(w A, clip(w, 1 - eps, 1 + eps) A), one number a completion.

    A good completion is pushed until its weight is above 1 + eps, a bad one until it is below
    1 - eps. Outside the clip the gradient is -A w grad log p.

    Args:
        weight: [completions], > 0, carries the gradient.
        advantage: [completions], data.
        clip_epsilon: in (0, 1).

    Returns:
        Loss and clip mask.

    Raises:
        ValueError: the shapes differ, or ``clip_epsilon`` is outside (0, 1).

    Source: PPO, arXiv:1707.06347, eq. 7, per completion as in arXiv:2508.17850.
    """
    if weight.shape != advantage.shape:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, advantage {tuple(advantage.shape)}")
    if not 0 < clip_epsilon < 1:
        raise ValueError(f"clip_epsilon is {clip_epsilon}, allowed is (0, 1)")
    clipped = weight.clamp(1 - clip_epsilon, 1 + clip_epsilon)
    loss = -torch.minimum(weight * advantage, clipped * advantage)
    too_high = (weight > 1 + clip_epsilon) & (advantage > 0)
    too_low = (weight < 1 - clip_epsilon) & (advantage < 0)
    return Surrogate(loss, too_high | too_low)
