"""The outer factor: how much an old group still counts. Sees ages and divergences, never rewards."""

import math

from torch import Tensor

from learner.objective.divergence import effective_sample_size_ratio, group_sample_size_ratio
from learner.objective.groups import Groups


def version_discount(staleness_versions: int, *, half_life_versions: float) -> float:
    """Return 2 ** (-staleness / half life): 1 for a fresh group, 1/2 after one half life.

    Args:
        staleness_versions: learner version minus the oldest behaviour version, >= 0.
        half_life_versions: > 0; infinity counts every group in full.

    Returns:
        In [0, 1], dimensionless.

    Raises:
        ValueError: the staleness is negative, or the half life is not positive.
    """
    _check_staleness(staleness_versions)
    if not half_life_versions > 0:
        raise ValueError(f"half_life_versions is {half_life_versions}, allowed is > 0")
    return float(2.0 ** (-staleness_versions / half_life_versions))


def polynomial_discount(staleness_versions: int, *, power: float) -> float:
    """Return (1 + staleness) ** -power: falls fast at first, and never to nothing.

    Args:
        staleness_versions: learner version minus the oldest behaviour version, >= 0.
        power: >= 0.

    Returns:
        In (0, 1], dimensionless.

    Raises:
        ValueError: the staleness or the power is negative.

    Source: FedAsync, arXiv:1903.03934, section 5.2.
    """
    _check_staleness(staleness_versions)
    if not power >= 0:
        raise ValueError(f"power is {power}, allowed is >= 0")
    return float((1 + staleness_versions) ** -power)


def sample_size_discount(log_ratio: Tensor, groups: Groups) -> Tensor:
    """Return each completion the effective share of its group under the plain weights p/q.

    Estimates of equal expectation are best averaged by the inverse of their variances, and a
    group's variance goes with the inverse of its effective sample size.

    Args:
        log_ratio: [n], nats: log of each completion's p/q, normalised by length.
        groups: the n completions by prompt.

    Returns:
        [n], float64, in [1/size, 1], without gradient.
    """
    return group_sample_size_ratio(log_ratio, groups)


def learning_rate_factor(weight: Tensor) -> float:
    """Return sqrt(min(1, ESS / B)), by which VCPO multiplies the learning rate of a step.

    Args:
        weight: [B], >= 0, at least one > 0.

    Returns:
        In [1 / sqrt(B), 1].

    Raises:
        ValueError: there are no weights, or all are 0.

    Source: VCPO, arXiv:2602.17616, section 4.
    """
    return math.sqrt(effective_sample_size_ratio(weight))


def sequence_learning_rate_factor(log_ratio: Tensor) -> float:
    """Return the factor of whole completions' weights p/q, neither truncated nor normalised by length.

    As published: the weight of the update may be truncated, the sample size is that of the whole ratio.
    It falls with length, and ends at 1/sqrt(B), which is one completion in effect.

    Args:
        log_ratio: [B], nats, sums over each completion's tokens; of any size.

    Returns:
        In [1 / sqrt(B), 1].

    Raises:
        ValueError: there is no completion.

    Source: VCPO, arXiv:2602.17616, section 4; its authors' code: ``ess_scaling_use_clipped=False``.
    """
    ratio = group_sample_size_ratio(log_ratio, Groups.single(log_ratio))
    return math.sqrt(float(ratio[0]))


def _check_staleness(staleness_versions: int) -> None:
    if staleness_versions < 0:
        raise ValueError(f"staleness is {staleness_versions} versions; a group from the future is not ours")
