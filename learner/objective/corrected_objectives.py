"""Objectives on tokens that bound, mask or split the token ratio p/q."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from learner.objective.advantage import standardised_advantage
from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome
from learner.objective.gates import (
    within_band,
    within_second_moment,
    within_total_variation,
    without_outlier,
)
from learner.objective.importance import log_linear_proximal
from learner.objective.log_ratio import bounded_ratio, is_beyond_bound
from learner.objective.options import (
    CispoOptions,
    ClipOptions,
    DecoupledOptions,
    GeometricMaskedOptions,
    IcePopOptions,
    MaskedOptions,
    SecondMomentOptions,
    SequenceMaskedOptions,
    TotalVariationOptions,
    TruncatedOptions,
)
from learner.objective.reduction import mean_of_token_means, mean_over_tokens
from learner.objective.surrogate import clipped_surrogate, decoupled_surrogate, likelihood_loss


def cispo(batch: ObjectiveBatch, options: CispoOptions) -> ObjectiveOutcome:
    """Clipped importance sampling: -sg[clip(rho)] A log p; every token has a gradient.

    Source: MiniMax-M1, arXiv:2506.13585, eq. 4.
    """
    whole = bounded_ratio(batch.log_ratio.detach())
    weight = whole.clamp(1 - options.clip_low, 1 + options.clip_high)
    loss = likelihood_loss(batch.learner_logprob, weight, _advantage(batch))
    return ObjectiveOutcome(
        mean_over_tokens(loss, batch),
        weight,
        torch.zeros_like(batch.mask),
        is_truncated=(whole > 1 + options.clip_high) & batch.mask,
    )


def tis(batch: ObjectiveBatch, options: TruncatedOptions) -> ObjectiveOutcome:
    """Truncated importance sampling: GRPO against the proximal policy, times min(prox/q, C).

    Source: https://fengyao.notion.site/off-policy-rl.
    """
    whole = bounded_ratio(_log_correction(batch))
    outcome = _corrected(whole.clamp(max=options.ceiling), batch, options)
    return replace(outcome, is_truncated=(whole > options.ceiling) & batch.mask & ~outcome.is_clipped)


def mis(batch: ObjectiveBatch, options: MaskedOptions) -> ObjectiveOutcome:
    """Masked importance sampling: likewise, times prox/q where it is within the band.

    The divisor counts what is rejected too.

    Source: https://richardli.xyz/rl-collapse, part 3.
    """
    return _corrected(_masked(_log_correction(batch), batch, options), batch, options)


def mis_sequence(batch: ObjectiveBatch, options: SequenceMaskedOptions) -> ObjectiveOutcome:
    """Masked importance sampling by whole completions: times prod_t prox/q where that is within the band.

    Source: https://richardli.xyz/rl-collapse, part 3; band as TRL's default, ``sequence_mask``.
    """
    log_ratio = _log_correction(batch).sum(dim=1, keepdim=True)
    outcome = _corrected(_masked(log_ratio, batch, options), batch, options)
    is_clamped = is_beyond_bound(log_ratio) & within_band(log_ratio, least=options.least, most=options.most)
    return replace(outcome, is_clamped=is_clamped[:, 0])


def mis_geometric(batch: ObjectiveBatch, options: GeometricMaskedOptions) -> ObjectiveOutcome:
    """Likewise by the geometric mean of a completion's prox/q, which does not grow with its length.

    Source: AReaL's rejection sampling of sequences by their ratio, and its upper bound.
    """
    log_ratio = batch.token_mean(_log_correction(batch))[:, None]
    return _corrected(_masked(log_ratio, batch, options), batch, options)


def icepop(batch: ObjectiveBatch, options: IcePopOptions) -> ObjectiveOutcome:
    """IcePop: M(prox/q) per token, M(k) = k within the band and 0 outside.

    Source: arXiv:2510.18855, section 3.
    """
    return _corrected(_masked(_log_correction(batch), batch, options), batch, options)


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
    is_beyond = bounded_ratio(prox - q) > options.behaviour_cap
    if options.beyond_cap == "truncate":
        # As if the sampler had found the token as much less unlikely: prox/q is then the cap.
        q = torch.where(is_beyond, prox - math.log(options.behaviour_cap), q)
    surrogate = decoupled_surrogate(
        p,
        prox,
        q,
        advantage,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        dual_clip=options.dual_clip,
    )
    loss, is_clipped = surrogate.loss, surrogate.is_clipped & batch.mask
    weight = bounded_ratio(prox - q) * bounded_ratio(p.detach() - prox)
    if options.beyond_cap == "mask":
        loss, weight = (torch.where(is_beyond, 0.0, values) for values in (loss, weight))
        is_clipped = (is_clipped | is_beyond) & batch.mask
    is_cut = is_beyond & batch.mask & ~is_clipped if options.beyond_cap == "truncate" else None
    return ObjectiveOutcome(mean_over_tokens(loss, batch), weight, is_clipped, is_truncated=is_cut)


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
    """Return log prox/q, [n, t], 0 outside the mask, without gradient."""
    return batch.within(batch.proximal - batch.behaviour_logprob.detach().to(batch.proximal.dtype))


def _masked(log_ratio: Tensor, batch: ObjectiveBatch, options: MaskedOptions) -> Tensor:
    """Return the ratio where it is within the band and no token has a veto, else 0."""
    inside = within_band(log_ratio, least=options.least, most=options.most)
    if options.veto > 0:
        inside = inside & without_outlier(_log_correction(batch), batch.mask, least=options.veto)[:, None]
    return torch.where(inside, bounded_ratio(log_ratio), 0.0)


def _corrected(factor: Tensor, batch: ObjectiveBatch, options: ClipOptions) -> ObjectiveOutcome:
    """Return factor * min(u A, clip(u) A), u = p/prox; the factor, [n, t] or [n, 1], is data."""
    ratio = bounded_ratio(batch.within(batch.learner_logprob - batch.proximal))
    surrogate = clipped_surrogate(
        ratio,
        _advantage(batch),
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        dual_clip=options.dual_clip,
    )
    is_off = (surrogate.is_clipped | (factor == 0)) & batch.mask
    return ObjectiveOutcome(
        mean_of_token_means(factor * surrogate.loss, batch), factor * ratio.detach(), is_off
    )


def _gated(inside: Tensor, batch: ObjectiveBatch, *, penalty: float) -> ObjectiveOutcome:
    """Return -rho A inside and 0 outside, plus penalty * log^2 rho everywhere."""
    log_ratio = batch.log_ratio
    weight = bounded_ratio(torch.where(inside, log_ratio, 0.0))
    taught = mean_over_tokens(torch.where(inside, -weight * _advantage(batch)[:, None], 0.0), batch)
    loss = taught + penalty * mean_over_tokens(log_ratio**2, batch)
    weight = bounded_ratio(log_ratio.detach())
    return ObjectiveOutcome(loss, weight, ~inside & batch.mask, taught=taught)
