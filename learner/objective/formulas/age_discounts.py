"""Discounts of a group's loss by its age, and VCPO's learning-rate factor. They never see rewards.

No group is dropped here: too old ones are refused in ``intake.group_verdict``.

The third outer factor, by effective sample size, is ``divergence.group_sample_size_ratio``.
"""

import math

from torch import Tensor

from learner.objective.formulas.divergence import group_sample_size_ratio
from learner.objective.groups import Groups


def version_discount(staleness_versions: int, *, half_life_versions: float) -> float:
    """Return 2 ** (-staleness / half life), in [0, 1]: 1 for a fresh group, 1/2 after one half life.

    Raises:
        ValueError: the staleness is negative, or the half life is not positive.
    """
    _check_staleness(staleness_versions)
    if not half_life_versions > 0:
        raise ValueError(f"half_life_versions is {half_life_versions}, allowed is > 0")
    return float(2.0 ** (-staleness_versions / half_life_versions))


def polynomial_discount(staleness_versions: int, *, power: float) -> float:
    """Return (1 + staleness) ** -power, in (0, 1]: falls fast at first, and never to nothing.

    Raises:
        ValueError: the staleness or the power is negative.

    Source: FedAsync, arXiv:1903.03934, section 5.2.
    """
    _check_staleness(staleness_versions)
    if not power >= 0:
        raise ValueError(f"power is {power}, allowed is >= 0")
    return float((1 + staleness_versions) ** -power)


def sequence_learning_rate_factor(log_ratio: Tensor) -> float:
    """Return VCPO's sqrt(ESS / B), in [1 / sqrt(B), 1], of whole completions' weights p/q.

    As published: the weight of the update may be truncated, the sample size is that of the whole ratio.
    It falls with length, and ends at 1/sqrt(B), which is one completion in effect.

    Args:
        log_ratio: [B], B >= 1, nats, sums over each completion's tokens; of any size.

    Source: VCPO, arXiv:2602.17616, section 4; its authors' code: ``ess_scaling_use_clipped=False``.
    """
    ratio = group_sample_size_ratio(log_ratio, Groups.single(log_ratio))
    return math.sqrt(float(ratio[0]))


def _check_staleness(staleness_versions: int) -> None:
    if staleness_versions < 0:
        raise ValueError(f"staleness is {staleness_versions} versions; a group cannot be from the future")
