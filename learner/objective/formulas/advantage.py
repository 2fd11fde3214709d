"""Advantages: how much better than its group each completion was.

Rewards are [n]; ``groups`` are the n completions by prompt, None: all of one. Every advantage is exactly 0 in
a group whose rewards are all equal, and in a group of one completion.
"""

import torch
from torch import Tensor

from learner.objective.groups import Groups


def centred_advantage(reward: Tensor, groups: Groups | None = None) -> Tensor:
    """Return each reward minus the mean of its group: [n], same unit.

    Not divided by the standard deviation: that would weigh easy and hard prompts more than those in between.

    Raises:
        ValueError: there is no completion, or more than one axis.

    Source: Dr. GRPO, arXiv:2503.20783, section 3; used by arXiv:2508.17850.
    """
    groups = groups or Groups.single(reward)
    # Differences to one member are exact zeros when all are equal; 0.1 + 0.1 + 0.1 over 3 is not 0.1.
    above_least = reward - groups.spread(groups.minimum(reward))
    return above_least - groups.spread(groups.mean(above_least))


def standardised_advantage(reward: Tensor, groups: Groups | None = None, *, epsilon: float = 1e-4) -> Tensor:
    """Return the centred reward over the standard deviation of its group (divisor size - 1) plus epsilon.

    Source: GRPO, arXiv:2402.03300, section 4.1.2; epsilon as in TRL.
    """
    groups = groups or Groups.single(reward)
    centred = centred_advantage(reward, groups)
    freedom = (groups.size(reward) - 1).clamp(min=1)
    deviation = torch.sqrt(groups.sum(centred**2) / freedom)
    return centred / (groups.spread(deviation) + epsilon)


def leave_one_out_advantage(reward: Tensor, groups: Groups | None = None) -> Tensor:
    """Return each reward minus the mean of the others in its group: [n], same unit.

    Source: RLOO, arXiv:2402.14740, section 3.
    """
    groups = groups or Groups.single(reward)
    size = groups.spread(groups.size(reward))
    return centred_advantage(reward, groups) * size / (size - 1).clamp(min=1)


def whitened_advantage(reward: Tensor, groups: Groups | None = None, *, epsilon: float = 1e-8) -> Tensor:
    """Return rewards centred in their groups, over their standard deviation in the whole batch.

    ``epsilon`` is added to the variance.

    Source: REINFORCE++ with baseline, arXiv:2501.03262, section 3.
    """
    centred = centred_advantage(reward, groups or Groups.single(reward))
    return centred * torch.rsqrt((centred**2).sum() / max(1, len(centred) - 1) + epsilon)


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer_share: float) -> Tensor:
    """Return DAPO's penalty on the reward of completions near the token limit: [n], 0 down to -1, linearly.

    Args:
        lengths: [n], tokens.
        max_tokens: the limit.
        buffer_share: part of the limit, in [0, 1], over which the penalty grows; 0: no penalty.

    Source: DAPO, arXiv:2503.14476, eq. 13.
    """
    if buffer_share == 0:
        return torch.zeros_like(lengths)
    buffer = buffer_share * max_tokens
    return ((max_tokens - buffer - lengths) / buffer).clamp(-1, 0)
