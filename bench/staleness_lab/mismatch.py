"""Mismatch that a real sampler adds to staleness: logprobs that are not the learner's, however fresh.

none        what was recorded is what was drawn from
bf16        recorded logprobs are rounded to bfloat16
quantised   completions are drawn, and recorded, by weights rounded to 4 bits
outliers    one token in 1000 is off by 3 to 10 nats, as where experts are routed apart: half of them
            unlikely in the record, half unlikely to the learner, whichever version it is
samplers    every other group is drawn, and recorded, at a temperature of 0.7, the others at 1.3
flipped     15 % of the rewards are 1 - reward
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from bench.staleness_lab.batched import Shapes

MISMATCHES: Final = ("none", "bf16", "quantised", "outliers", "samplers", "flipped")

TEMPERATURES: Final = (0.7, 1.3)
FLIPPED_SHARE: Final = 0.15

OUTLIER_SHARE: Final = 1e-3
OUTLIER_NATS: Final = (3.0, 10.0)
_STEPS: Final = 7
"""On either side of 0: 4 bits."""
_BLOCK: Final = 64
"""Parameters that share a scale."""


@dataclass(frozen=True, slots=True, eq=False)
class Shift:
    """Shift of the logprobs of a version's tokens, [seeds, n, t], nats."""

    recorded: Tensor
    learner: Tensor


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


def recorded_logprob(mismatch: str, logprob: Tensor) -> Tensor:
    """Return what a sampler writes down of its own logprobs."""
    return logprob.to(torch.bfloat16).to(logprob.dtype) if mismatch == "bf16" else logprob


def outlier_shift(mismatch: str, shape: tuple[int, ...], generators: list[torch.Generator]) -> Shift | None:
    """Draw the outliers of one version; a seed's do not depend on the other seeds.

    Args:
        mismatch: key of ``MISMATCHES``.
        shape: n, t of each seed.
        generators: one a seed.
    """
    if mismatch != "outliers":
        return None
    low, high = OUTLIER_NATS
    drawn = torch.stack([torch.rand((2, *shape), generator=each) for each in generators])
    which, how_far = drawn[:, 0], -(low + (high - low) * drawn[:, 1])
    recorded = torch.where(which < OUTLIER_SHARE / 2, how_far, 0.0)
    learner = torch.where((which >= OUTLIER_SHARE / 2) & (which < OUTLIER_SHARE), how_far, 0.0)
    return Shift(recorded, learner)


def given_reward(mismatch: str, reward: Tensor, generators: list[torch.Generator]) -> Tensor:
    """Return the rewards that arrive, [seeds, n], from those that were earned; generators: one a seed."""
    if mismatch != "flipped":
        return reward
    drawn = torch.stack([torch.rand(reward.shape[1:], generator=each) for each in generators])
    return torch.where(drawn < FLIPPED_SHARE, 1 - reward, reward)
