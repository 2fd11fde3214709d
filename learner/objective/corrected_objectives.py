"""Objectives on tokens that bound, mask or split the token ratio p/q."""

import torch
from torch import Tensor

from learner.objective.advantage import standardised_advantage
from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome
from learner.objective.gates import within_band, within_second_moment, within_total_variation
from learner.objective.importance import log_linear_proximal
from learner.objective.options import (
    CispoOptions,
    ClipOptions,
    DecoupledOptions,
    IcePopOptions,
    MaskedOptions,
    SecondMomentOptions,
    TotalVariationOptions,
    TruncatedOptions,
)
from learner.objective.reduction import mean_of_token_means, mean_over_tokens
from learner.objective.surrogate import clipped_surrogate, decoupled_surrogate, likelihood_loss


def cispo(batch: ObjectiveBatch, options: CispoOptions) -> ObjectiveOutcome:
    """Clipped importance sampling: -sg[clip(rho)] A log p; every token has a gradient.

    Source: MiniMax-M1, arXiv:2506.13585, eq. 4.
    """
    weight = batch.log_ratio.detach().exp().clamp(1 - options.clip_low, 1 + options.clip_high)
    loss = likelihood_loss(batch.learner_logprob, weight, _advantage(batch))
    return ObjectiveOutcome(mean_over_tokens(loss, batch), weight, torch.zeros_like(batch.mask))


def tis(batch: ObjectiveBatch, options: TruncatedOptions) -> ObjectiveOutcome:
    """Truncated importance sampling: GRPO against the proximal policy, times min(prox/q, C).

    Source: https://fengyao.notion.site/off-policy-rl.
    """
    factor = _log_correction(batch).exp().clamp(max=options.ceiling)
    return _corrected(factor, batch, options)


def mis(batch: ObjectiveBatch, options: MaskedOptions) -> ObjectiveOutcome:
    """Masked importance sampling: likewise, times prox/q where it is within the band.

    Source: https://richardli.xyz/rl-collapse, part 3.
    """
    log_ratio = _log_correction(batch)
    factor = log_ratio.exp() * within_band(log_ratio, least=options.least, most=options.most)
    return _corrected(factor, batch, options)


def icepop(batch: ObjectiveBatch, options: IcePopOptions) -> ObjectiveOutcome:
    """IcePop: likewise, times 1 where prox/q is within the band.

    Source: arXiv:2510.18855, section 3.
    """
    log_ratio = _log_correction(batch)
    factor = within_band(log_ratio, least=options.least, most=options.most).to(log_ratio.dtype)
    return _corrected(factor, batch, options)


def decoupled_ppo(batch: ObjectiveBatch, options: DecoupledOptions) -> ObjectiveOutcome:
    """(prox/q) min(u A, clip(u) A), u = p/prox: the clip is around a recent policy, the weight is whole.

    Source: AReaL, arXiv:2505.24298, eq. 5; log-linear: A-3PO, arXiv:2512.06547.
    """
    proximal = batch.proximal
    if options.proximal == "log_linear":
        proximal = log_linear_proximal(
            batch.learner_logprob, batch.behaviour_logprob, batch.staleness_versions
        )
    p, prox = batch.within(batch.learner_logprob), batch.within(proximal)
    q = batch.within(batch.behaviour_logprob.to(p.dtype))
    advantage = _advantage(batch)
    surrogate = decoupled_surrogate(
        p, prox, q, advantage, clip_low=options.clip_low, clip_high=options.clip_high
    )
    weight = torch.exp(prox - q) * torch.exp(p.detach() - prox)
    return ObjectiveOutcome(mean_over_tokens(surrogate.loss, batch), weight, surrogate.is_clipped)


def dppo_tv(batch: ObjectiveBatch, options: TotalVariationOptions) -> ObjectiveOutcome:
    """Divergence PPO: -rho A for tokens whose probability has not moved too far, plus c log^2 rho.

    Source: arXiv:2602.04879, section 4.
    """
    inside = within_total_variation(
        batch.learner_logprob, batch.behaviour_logprob, _advantage(batch), limit=options.limit
    )
    return _gated(inside, batch, penalty=options.penalty)


def m2po(batch: ObjectiveBatch, options: SecondMomentOptions) -> ObjectiveOutcome:
    """Second-moment trust: -rho A without the tokens of largest log^2 rho in the batch.

    Source: arXiv:2510.01161, algorithm 1.
    """
    inside = within_second_moment(batch.log_ratio, batch.mask, limit=options.limit)
    return _gated(inside, batch, penalty=0.0)


def _advantage(batch: ObjectiveBatch) -> Tensor:
    return standardised_advantage(batch.reward, batch.groups).to(batch.learner_logprob.dtype)


def _log_correction(batch: ObjectiveBatch) -> Tensor:
    """Give log prox/q, [n, t], 0 outside the mask, without gradient."""
    return batch.within(batch.proximal - batch.behaviour_logprob.detach().to(batch.proximal.dtype))


def _corrected(factor: Tensor, batch: ObjectiveBatch, options: ClipOptions) -> ObjectiveOutcome:
    """Give factor * min(u A, clip(u) A), u = p/prox; the factor is data."""
    ratio = batch.within(batch.learner_logprob - batch.proximal).exp()
    surrogate = clipped_surrogate(
        ratio, _advantage(batch), clip_low=options.clip_low, clip_high=options.clip_high
    )
    is_off = (surrogate.is_clipped | (factor == 0)) & batch.mask
    return ObjectiveOutcome(
        mean_of_token_means(factor * surrogate.loss, batch), factor * ratio.detach(), is_off
    )


def _gated(inside: Tensor, batch: ObjectiveBatch, *, penalty: float) -> ObjectiveOutcome:
    """Give -rho A inside and 0 outside, plus penalty * log^2 rho everywhere."""
    log_ratio = batch.log_ratio
    weight = torch.where(inside, log_ratio, 0.0).exp()
    loss = torch.where(inside, -weight * _advantage(batch)[:, None], 0.0) + penalty * log_ratio**2
    return ObjectiveOutcome(mean_over_tokens(loss, batch), log_ratio.detach().exp(), ~inside & batch.mask)
