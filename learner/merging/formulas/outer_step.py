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

Source: DiLoCo, arXiv:2311.08105, algorithm 1; weights by tokens: Decoupled DiLoCo, arXiv:2604.21428.
"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from learner.merging.contribution import ContributionReport


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


def weights_of(
    reports: Sequence[ContributionReport], weighting: Literal["groups", "tokens"]
) -> tuple[float, ...]:
    """Return the weight of each contribution of a round, in the order given; the sum is 1.

    ``groups`` counts the groups of its steps, so that every group weighs alike. ``tokens`` is tokens^2 /
    steps: tokens times tokens a step. Groups and tokens are believed; compare them with what was dealt first.

    Raises:
        ValueError: no contribution has a step by which it moved.
    """
    shares = [_groups(report) if weighting == "groups" else _token_share(report) for report in reports]
    total = sum(shares)
    if total <= 0:
        raise ValueError("none of the contributions has trained on anything")
    return tuple(share / total for share in shares)


def _groups(report: ContributionReport) -> float:
    return float(sum(len(step.groups) for step in report.steps))


def _token_share(report: ContributionReport) -> float:
    return float(report.tokens) ** 2 / len(report.steps) if report.steps else 0.0
