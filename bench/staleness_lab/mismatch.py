"""Faults that a real fleet adds to staleness: policies that are not the learner's, rewards that are wrong.

none        completions are drawn from the learner's version, and earn what they earned
quantised   completions are drawn, and recorded, by weights rounded to 4 bits
samplers    every other group is drawn, and recorded, at a temperature of 0.7, the others at 1.3
flipped     15 % of the rewards are 1 - reward
"""

from typing import Final

import torch
from torch import Tensor

from bench.staleness_lab.batched import Shapes

MISMATCHES: Final = ("none", "quantised", "samplers", "flipped")

TEMPERATURES: Final = (0.7, 1.3)
FLIPPED_SHARE: Final = 0.15

_STEPS: Final = 7
"""On either side of 0: 4 bits."""
_BLOCK: Final = 64
"""Parameters that share a scale."""


def sampling_weights(mismatch: str, theta: Tensor, shapes: Shapes) -> Tensor:
    """Return the parameters that sample, [seeds, groups, parameters], from those of the learner's versions.

    Where quantised in 15 levels a block. Logits of all tasks are linear in the parameters whose names begin
    with ``output``, so that a temperature divides those.
    """
    if mismatch == "samplers":
        groups = torch.arange(theta.shape[1]) % 2
        cooling = 1 / torch.tensor(TEMPERATURES)[groups].unsqueeze(1)
        return torch.where(shapes.columns("output"), theta * cooling, theta)
    if mismatch != "quantised":
        return theta
    size = theta.shape[-1]
    blocks = torch.nn.functional.pad(theta, (0, -size % _BLOCK)).view(*theta.shape[:-1], -1, _BLOCK)
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12) / _STEPS
    return ((blocks / scale).round() * scale).flatten(-2)[..., :size]


def given_reward(mismatch: str, reward: Tensor, generators: list[torch.Generator]) -> Tensor:
    """Return the rewards that arrive, [seeds, n], from those that were earned; generators: one a seed."""
    if mismatch != "flipped":
        return reward
    drawn = torch.stack([torch.rand(reward.shape[1:], generator=each) for each in generators])
    return torch.where(drawn < FLIPPED_SHARE, 1 - reward, reward)
