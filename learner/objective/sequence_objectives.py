"""Objectives with one weight a completion, taken from that completion alone."""

import torch

from learner.objective.advantage import centred_advantage, standardised_advantage
from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome
from learner.objective.importance import clipped_geometric_mean_weight, gamma_weight, geometric_mean_weight
from learner.objective.options import GmpoOptions, GspoOptions, Options, ToprOptions, VespoOptions
from learner.objective.reduction import mean_over_completions, mean_over_tokens
from learner.objective.surrogate import clipped_surrogate, likelihood_loss


def gspo(batch: ObjectiveBatch, options: GspoOptions) -> ObjectiveOutcome:
    """Group sequence policy optimization: the geometric mean of token ratios, clipped tightly.

    Source: arXiv:2507.18071, eq. 5-7.
    """
    weight = geometric_mean_weight(batch.log_ratio, batch.mask)
    advantage = standardised_advantage(batch.reward, batch.groups)
    surrogate = clipped_surrogate(weight, advantage, clip_low=options.clip_low, clip_high=options.clip_high)
    loss = mean_over_completions(surrogate.loss, batch)
    return ObjectiveOutcome(loss, weight.detach(), surrogate.is_clipped)


def gmpo(batch: ObjectiveBatch, options: GmpoOptions) -> ObjectiveOutcome:
    """Geometric-mean policy optimization: token ratios are clipped before their geometric mean is taken.

    Source: arXiv:2507.20673, eq. 4.
    """
    advantage = standardised_advantage(batch.reward, batch.groups).to(batch.learner_logprob.dtype)
    log_ratio = batch.log_ratio
    weight = clipped_geometric_mean_weight(log_ratio, batch.mask, advantage, log_clip=options.log_clip)
    is_good = (advantage >= 0)[:, None]
    is_clipped = torch.where(is_good, log_ratio > options.log_clip, log_ratio < -options.log_clip)
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
    is_good = advantage >= 0
    weight = gamma_weight(
        log_ratio,
        power=torch.where(is_good, options.power_good, options.power_bad).to(log_ratio.dtype),
        rate=torch.where(is_good, options.rate_good, options.rate_bad).to(log_ratio.dtype),
    )
    loss = likelihood_loss(batch.learner_logprob, weight[:, None], advantage)
    return ObjectiveOutcome(mean_over_tokens(loss, batch), weight, torch.zeros_like(weight, dtype=torch.bool))


def importance_sampling(batch: ObjectiveBatch, options: Options) -> ObjectiveOutcome:
    """-(p/q) A of whole completions: without bias, and with all of the variance."""
    weight = batch.log_ratio.sum(dim=1).exp()
    advantage = centred_advantage(batch.reward, batch.groups).to(weight.dtype)
    loss = mean_over_completions(-weight * advantage, batch)
    return ObjectiveOutcome(loss, weight.detach(), torch.zeros_like(weight, dtype=torch.bool))
