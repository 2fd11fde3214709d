"""How much better than its group each completion was."""

import torch
from torch import Tensor

from learner.objective.groups import Groups


def centred_advantage(reward: Tensor, groups: Groups | None = None) -> Tensor:
    """Give each reward minus the mean of its group.

    Not divided by the standard deviation: that would weigh easy and hard prompts more than
    those in between. A group whose rewards are all equal gets exactly 0, also where the mean
    is not representable.

    Args:
        reward: [n], any unit.
        groups: the n completions by prompt; None: all of one.

    Returns:
        [n], same unit; sums to 0 in each group within rounding.

    Raises:
        ValueError: there is no completion, or more than one axis.

    Source: Dr. GRPO, arXiv:2503.20783, section 3; used by arXiv:2508.17850.
    """
    groups = groups or Groups.single(reward)
    # Differences to one member are exact zeros when all are equal; 0.1 + 0.1 + 0.1 over 3 is not 0.1.
    above_least = reward - groups.spread(groups.minimum(reward))
    return above_least - groups.spread(groups.mean(above_least))


def standardised_advantage(reward: Tensor, groups: Groups | None = None, *, epsilon: float = 1e-4) -> Tensor:
    """Give the centred reward over the standard deviation of its group (divisor size - 1) plus epsilon.

    A group of one completion, or of equal rewards, gets exactly 0.

    Args:
        reward: [n], any unit.
        groups: the n completions by prompt; None: all of one.
        epsilon: > 0, unit of ``reward``.

    Returns:
        [n], dimensionless.

    Source: GRPO, arXiv:2402.03300, section 4.1.2; epsilon as in TRL.
    """
    groups = groups or Groups.single(reward)
    centred = centred_advantage(reward, groups)
    freedom = (groups.size(reward) - 1).clamp(min=1)
    deviation = torch.sqrt(groups.sum(centred**2) / freedom)
    return centred / (groups.spread(deviation) + epsilon)
