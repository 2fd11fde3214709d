r"""The outer step: how the changes of a round become the next version.

    D     = -sum_i w_i d_i              d_i: change of contributor i, masters after its steps minus the anchor
    m     <- beta m + D
    theta <- theta - gamma (D + beta m)

This is SGD with Nesterov momentum on the pseudo-gradient D, as torch's optimizer takes it. gamma 1 and beta 0
are federated averaging: theta moves by the mean change.

Everything is elementwise, so a tensor may be merged whole, in slices or in shards, with the same bits. Sums
are taken in float64 and in the order given, and products are rounded before they are added (no fused
operation), so any machine replays the same bits. One change of weight 1 with gamma 1 and beta 0 gives theta +
d, rounded once.

Sources: DiLoCo, arXiv:2311.08105, algorithm 1; weights by tokens: Decoupled DiLoCo, arXiv:2604.21428; median
and trimmed mean: arXiv:1803.01498.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from learner.merging.merge_settings import Combine

LEAST_RANKED: Final = 3
"""Fewer changes have no middle."""

_SLICE: Final = 1 << 20
"""Entries that are ranked at once."""


def outer_step(theta: Tensor, momentum: Tensor | None, change: Tensor, *, rate: float, beta: float) -> None:
    """Move ``theta`` and ``momentum`` in place by the mean change of a round.

    Args:
        theta: masters, any shape and float type; rounded once from float64.
        momentum: like ``theta``, zeros at first. None: ``beta`` is 0, which needs none.
        change: float64, like ``theta``.
        rate: gamma, > 0.
        beta: in [0, 1).
    """
    towards = -change
    if beta != 0:
        if momentum is None:
            raise ValueError("a step with momentum needs the momentum of the steps before")
        memory = momentum.double() * beta + towards
        momentum.copy_(memory)
        towards = towards + memory * beta
    theta.copy_(theta.double() - towards * rate)


def mean_change(changes: Sequence[tuple[float, Tensor]]) -> Tensor:
    """Return the sum of weight times change, float64, added in the order given: of the contributors' names.

    Raises:
        ValueError: there is none.
    """
    if not changes:
        raise ValueError("there is no mean of no changes")
    total: Tensor | None = None
    for weight, change in changes:
        part = change.double() * weight
        total = part if total is None else total + part
    assert total is not None
    return total


def combined(changes: Sequence[tuple[float, Tensor]], combine: Combine) -> Tensor:
    """Return what changes of one tensor amount to, float64, entry by entry.

    ``mean`` is that by weight; the others take each change alike. ``median`` is the middle one, or the mean
    of both. ``trimmed_mean`` is the mean without the least and the largest quarter, one of each at least.
    With fewer than ``LEAST_RANKED`` changes there is no middle, and all are the mean.

    Args:
        changes: weights, whose sum is 1, and float64 tensors of one shape, sorted by contributor.

    Raises:
        ValueError: there is none.
    """
    count = len(changes)
    if combine == "mean" or count < LEAST_RANKED:
        return mean_change(changes)
    cut = (count - 1) // 2 if combine == "median" else max(1, count // 4)
    flat = [change.reshape(-1) for _, change in changes]
    result = torch.empty_like(flat[0])
    for first in range(0, len(result), _SLICE):
        part = slice(first, first + _SLICE)
        ranked = torch.stack([one[part] for one in flat]).sort(dim=0).values[cut : count - cut]
        result[part] = mean_change([(1 / len(ranked), one) for one in ranked])
    return result.view(changes[0][1].shape)


@dataclass(frozen=True, slots=True)
class Worked:
    """The work behind a contribution, as the learner counts it in the groups that it dealt."""

    trained_groups: int
    """Groups of steps by which the contributor moved."""
    tokens: int
    """Drawn tokens of these."""
    groups: int
    """All groups that it consumed, in batches of one size."""


def weights_of(worked: Sequence[Worked], weighting: Literal["groups", "tokens"]) -> tuple[float, ...]:
    """Return the weight of each contribution of a round, in the order given; the sum is 1.

    ``groups`` counts the groups of its steps, so that every group weighs alike. ``tokens`` is tokens^2 /
    steps, tokens times tokens a step, where steps are the batches that it consumed: who leaves some out of
    its report has fewer tokens, and no fewer steps.

    Raises:
        ValueError: no contribution has a step by which it moved.
    """
    shares = [
        float(one.trained_groups) if weighting == "groups" else one.tokens**2 / max(1, one.groups)
        for one in worked
    ]
    total = sum(shares)
    if total <= 0:
        raise ValueError("none of the contributions has trained on anything")
    return tuple(share / total for share in shares)
