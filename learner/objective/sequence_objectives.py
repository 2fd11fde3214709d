"""Objectives with one weight a completion."""

from typing import Final

import torch

from learner.objective.advantage import centred_advantage, off_policy_advantage, standardised_advantage
from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome
from learner.objective.importance import clipped_geometric_mean_weight, gamma_weight, geometric_mean_weight
from learner.objective.log_ratio import bounded_ratio, is_beyond_bound
from learner.objective.options import (
    GmpoOptions,
    GspoOptions,
    Options,
    ToprOptions,
    VcpoOptions,
    VespoOptions,
)
from learner.objective.reduction import mean_over_completions, mean_over_tokens
from learner.objective.surrogate import clipped_surrogate, likelihood_loss

_LEAST_DEVIATION: Final = 1e-8
"""Groups of smaller deviations are not divided by them."""


def gspo(batch: ObjectiveBatch, options: GspoOptions) -> ObjectiveOutcome:
    """Group sequence policy optimization: the geometric mean of token ratios, clipped tightly.

    Source: arXiv:2507.18071, eq. 5-7.
    """
    weight = geometric_mean_weight(batch.log_ratio, batch.mask)
    advantage = standardised_advantage(batch.reward, batch.groups)
    surrogate = clipped_surrogate(
        weight,
        advantage,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        dual_clip=options.dual_clip,
    )
    loss = mean_over_completions(surrogate.loss, batch)
    return ObjectiveOutcome(loss, weight.detach(), surrogate.is_clipped)


def gmpo(batch: ObjectiveBatch, options: GmpoOptions) -> ObjectiveOutcome:
    """Geometric-mean policy optimization: token ratios are clipped before their geometric mean is taken.

    Source: arXiv:2507.20673, eq. 4.
    """
    advantage = standardised_advantage(batch.reward, batch.groups).to(batch.learner_logprob.dtype)
    log_ratio = batch.log_ratio
    weight = clipped_geometric_mean_weight(log_ratio, batch.mask, advantage, log_clip=options.log_clip)
    is_good, is_bad = (advantage > 0)[:, None], (advantage < 0)[:, None]
    is_clipped = (is_good & (log_ratio > options.log_clip)) | (is_bad & (log_ratio < -options.log_clip))
    return ObjectiveOutcome(
        mean_over_completions(-weight * advantage, batch), weight.detach(), is_clipped.detach()
    )


def topr(batch: ObjectiveBatch, options: ToprOptions) -> ObjectiveOutcome:
    """Tapered off-policy REINFORCE: good completions count in full, bad ones min(p/q, 1).

    Source: arXiv:2503.14286, eq. 8.
    """
    log_ratio, log_likelihood = batch.log_ratio.sum(dim=1), batch.within(batch.learner_logprob).sum(dim=1)
    if options.is_length_normalised:
        log_ratio, log_likelihood = log_ratio / batch.lengths, log_likelihood / batch.lengths
    advantage = centred_advantage(batch.reward, batch.groups)
    tapered = log_ratio.detach().clamp(max=0).exp()
    weight = torch.where(advantage >= 0, torch.ones_like(tapered), tapered)
    loss = mean_over_completions(likelihood_loss(log_likelihood, weight, advantage), batch)
    return ObjectiveOutcome(loss, weight, torch.zeros_like(weight, dtype=torch.bool))


def vespo(batch: ObjectiveBatch, options: VespoOptions) -> ObjectiveOutcome:
    """Variational sequence-level soft policy optimization: W^k exp(lambda (1 - W)), W of whole completions.

    Source: arXiv:2602.10693, eq. 14.
    """
    log_ratio = batch.log_ratio.sum(dim=1)
    advantage = standardised_advantage(batch.reward, batch.groups)
    good_and_bad = log_ratio.new_tensor(
        [[options.power_good, options.rate_good], [options.power_bad, options.rate_bad]]
    )
    power, rate = good_and_bad[(advantage < 0).long()].unbind(dim=1)
    weight = gamma_weight(log_ratio, power=power, rate=rate)
    loss = likelihood_loss(batch.learner_logprob, weight[:, None], advantage)
    return ObjectiveOutcome(mean_over_tokens(loss, batch), weight, torch.zeros_like(weight, dtype=torch.bool))


def importance_sampling(batch: ObjectiveBatch, options: Options) -> ObjectiveOutcome:
    """-(p/q) A of whole completions: without bias, and with all of the variance."""
    log_ratio = batch.log_ratio.sum(dim=1)
    weight, is_clamped = bounded_ratio(log_ratio), is_beyond_bound(log_ratio)
    advantage = centred_advantage(batch.reward, batch.groups).to(weight.dtype)
    loss = mean_over_completions(-weight * advantage, batch)
    return ObjectiveOutcome(loss, weight.detach(), torch.zeros_like(is_clamped), is_clamped)


def vcpo(batch: ObjectiveBatch, options: VcpoOptions) -> ObjectiveOutcome:
    """Variance-controlled policy optimization: -sg[min(p/q, C)] A log p of whole completions, per token.

    A is the reward less the off-policy optimal baseline, divided by the standard deviation of the group's
    rewards (divisor: size). The baseline asks for the gradient's length, which takes a backward pass for
    every completion; here its square is the number of tokens, as for tokens whose gradients are of one length
    and orthogonal (OPO, arXiv:2505.23585, section 3). Under it a sum over tokens with whole weights varies
    least, which is what was published; this loss is a mean over tokens with truncated weights, for which
    another baseline would be best where lengths differ or weights are truncated.

    Source: arXiv:2602.17616, section 4.
    """
    groups, log_ratio = batch.groups, batch.log_ratio.detach().sum(dim=1)
    advantage = off_policy_advantage(batch.reward, log_ratio, batch.lengths, groups)
    centred = centred_advantage(batch.reward, groups)
    deviation = groups.spread(groups.mean(centred**2).sqrt())
    advantage = torch.where(deviation > _LEAST_DEVIATION, advantage / deviation, advantage)
    whole = bounded_ratio(log_ratio)
    weight = whole.clamp(max=options.ceiling)
    loss = mean_over_completions(likelihood_loss(batch.learner_mean, weight, advantage), batch)
    is_clamped = is_beyond_bound(log_ratio) & (weight < options.ceiling)
    is_cut = (whole > options.ceiling)[:, None] & batch.mask
    return ObjectiveOutcome(loss, weight, torch.zeros_like(is_clamped), is_clamped, is_truncated=is_cut)
