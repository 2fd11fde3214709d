"""How much better than its group each completion was."""

from typing import Final

import torch
from torch import Tensor

from learner.objective.groups import Groups

_MEAN_MARGIN: Final = 1e-6
"""Keeps a density finite at mean rewards of 0 and 1, where advantages are 0 anyway."""


def centred_advantage(reward: Tensor, groups: Groups | None = None) -> Tensor:
    """Return each reward minus the mean of its group.

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
    """Return the centred reward over the standard deviation of its group (divisor size - 1) plus epsilon.

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


def leave_one_out_advantage(reward: Tensor, groups: Groups | None = None) -> Tensor:
    """Return each reward minus the mean of the others in its group; 0 in a group of one.

    Args, returns: as ``centred_advantage``.

    Source: RLOO, arXiv:2402.14740, section 3.
    """
    groups = groups or Groups.single(reward)
    size = groups.spread(groups.size(reward))
    return centred_advantage(reward, groups) * size / (size - 1).clamp(min=1)


def whitened_advantage(reward: Tensor, groups: Groups | None = None, *, epsilon: float = 1e-8) -> Tensor:
    """Return rewards centred in their groups, over their standard deviation in the whole batch.

    Args:
        reward: [n], any unit.
        groups: the n completions by prompt; None: all of one.
        epsilon: > 0, added to the variance.

    Returns:
        [n], dimensionless, mean 0; exactly 0 where a group's rewards are equal.

    Source: REINFORCE++ with baseline, arXiv:2501.03262, section 3.
    """
    centred = centred_advantage(reward, groups or Groups.single(reward))
    return centred * torch.rsqrt((centred**2).sum() / max(1, len(centred) - 1) + epsilon)


def beta_normalised_advantage(reward: Tensor, groups: Groups) -> Tensor:
    """Return the centred reward over a Beta density at its group's mean reward.

    The density is Beta(1 + a/3, 1 + b/3), where Beta(a, b) has the mean and the variance of the mean
    rewards of the batch's groups; this normaliser minimises the variance of the gradient. Means at which
    the density is 0 belong to groups of equal rewards, whose advantage is 0. One group alone, or means
    that are all equal or spread wider than a Beta can be, leave the density uniform.

    Args:
        reward: [n], in [0, 1].
        groups: the n completions by prompt.

    Returns:
        [n], dimensionless.

    Raises:
        ValueError: a reward is outside [0, 1].

    Source: BNPO, arXiv:2506.02864, eq. 8-12.
    """
    if not bool(((reward >= 0) & (reward <= 1)).all()):
        raise ValueError(f"rewards of {reward.tolist()}: Beta normalisation needs them within [0, 1]")
    means = groups.mean(reward)
    density = torch.ones_like(means)
    variance = means.var() if groups.count > 1 else means.new_zeros(())
    if variance > 0:
        mean = means.mean()
        total = mean * (1 - mean) / variance - 1
        alpha, beta = (1 + (total * share).clamp(min=0) / 3 for share in (mean, 1 - mean))
        density = _beta_density(means.clamp(_MEAN_MARGIN, 1 - _MEAN_MARGIN), alpha, beta)
    return centred_advantage(reward, groups) / groups.spread(density)


def soft_advantage(reward: Tensor, groups: Groups | None = None, *, temperature: float) -> Tensor:
    """Return each reward minus tau log mean exp(reward / tau) of its group; exactly 0 where all are equal.

    Args:
        reward: [n], any unit.
        groups: the n completions by prompt; None: all of one.
        temperature: tau > 0, unit of ``reward``. Small: the baseline is the best reward; large: the mean.

    Returns:
        [n], same unit.

    Source: OPMD of Trinity-RFT, arXiv:2505.17826, after Kimi k1.5.
    """
    groups = groups or Groups.single(reward)
    above_least = reward - groups.spread(groups.minimum(reward))
    log_mean = groups.logsumexp(above_least / temperature) - groups.size(reward).log()
    return above_least - groups.spread(temperature * log_mean)


def off_policy_advantage(
    reward: Tensor, log_weight: Tensor, squared_norm: Tensor, groups: Groups | None = None
) -> Tensor:
    """Return each reward minus the baseline under which its group's weighted gradient varies least.

    b = sum w^2 g^2 r / sum w^2 g^2, with w the importance weight and g the length of each completion's
    gradient, both as the loss has them: the mean over T orthogonal tokens has g^2 of 1/T, their sum of T.
    Exactly 0 where all rewards of a group are equal.

    Args:
        reward: [n], any unit.
        log_weight: [n], nats: log p/q of whole completions, however large.
        squared_norm: [n], > 0: g^2, in any unit.
        groups: the n completions by prompt; None: all of one.

    Returns:
        [n], unit and type of ``reward``, without gradient.

    Source: VCPO's off-policy optimal baseline, arXiv:2602.17616, section 4.
    """
    groups = groups or Groups.single(reward)
    log_share = 2 * log_weight.detach().double() + squared_norm.detach().double().log()
    share = torch.exp(log_share - groups.spread(groups.logsumexp(log_share))).to(reward.dtype)
    above_least = reward - groups.spread(groups.minimum(reward))
    return above_least - groups.spread(groups.sum(share * above_least))


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer_share: float) -> Tensor:
    """Return what DAPO takes from the reward of completions near the token limit: 0 down to -1, linearly.

    Args:
        lengths: [n], tokens.
        max_tokens: the limit.
        buffer_share: part of the limit, in [0, 1], over which the penalty grows; 0: no penalty.

    Returns:
        [n], in [-1, 0], in the unit of a reward between 0 and 1.

    Source: DAPO, arXiv:2503.14476, eq. 13.
    """
    if buffer_share == 0:
        return torch.zeros_like(lengths)
    buffer = buffer_share * max_tokens
    return ((max_tokens - buffer - lengths) / buffer).clamp(-1, 0)


def _beta_density(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    log_normaliser = torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(alpha + beta)
    return torch.exp((alpha - 1) * x.log() + (beta - 1) * torch.log1p(-x) - log_normaliser)
