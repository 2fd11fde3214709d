"""How much better than its group each completion was."""

import torch
from torch import Tensor


def centred_advantage(reward: Tensor) -> Tensor:
    """Give each reward minus the mean of its group.

    Not divided by the standard deviation: that would weigh easy and hard prompts more than
    those in between. A group whose rewards are all equal gets exactly 0, also where the mean
    is not representable.

    Args:
        reward: [group], any unit.

    Returns:
        [group], same unit; sums to 0 within rounding.

    Raises:
        ValueError: the group is empty or not one-dimensional.

    Source: Dr. GRPO, arXiv:2503.20783, section 3; used by arXiv:2508.17850.
    """
    if reward.ndim != 1 or len(reward) == 0:
        raise ValueError(f"reward has shape {tuple(reward.shape)}; a group has one axis and a completion")
    # Differences to one member are exact zeros when all are equal; 0.1 + 0.1 + 0.1 over 3 is not 0.1.
    above_first = reward - reward[0]
    return above_first - torch.mean(above_first)
