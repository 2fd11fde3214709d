"""GSPO, CISPO, TIS, MIS, decoupled PPO, DPPO: objectives that average, bound, mask or split ratios p/q."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from learner.objective.batch import (
    ObjectiveBatch,
    ObjectiveOutcome,
    mean_of_token_means,
    mean_over_completions,
    mean_over_tokens,
)
from learner.objective.formulas.advantage import standardised_advantage
from learner.objective.formulas.importance import geometric_mean_weight, log_linear_proximal
from learner.objective.formulas.log_ratio import bounded_ratio
from learner.objective.formulas.surrogate import (
    clipped_surrogate,
    decoupled_surrogate,
    likelihood_loss,
)
from learner.objective.formulas.trust_regions import within_band, within_total_variation, without_outlier
from learner.objective.options import (
    CispoOptions,
    ClipOptions,
    DecoupledOptions,
    GeometricMaskedOptions,
    GspoOptions,
    TotalVariationOptions,
    TruncatedOptions,
)


def gspo(batch: ObjectiveBatch, options: GspoOptions) -> ObjectiveOutcome:
    """Group sequence policy optimization: the geometric mean of token ratios, clipped tightly.

    Source: arXiv:2507.18071, eq. 5-7.
    """
    weight = geometric_mean_weight(batch.log_ratio, batch.mask)
    advantage = standardised_advantage(batch.reward, batch.groups)
    surrogate = clipped_surrogate(weight, advantage, **options.clips)
    return ObjectiveOutcome(
        mean_over_completions(surrogate.loss, batch), weight.detach(), surrogate.is_clipped
    )


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


def mis_geometric(batch: ObjectiveBatch, options: GeometricMaskedOptions) -> ObjectiveOutcome:
    """Masked importance sampling by completions: GRPO against the proximal policy, times mean prox/q.

    The geometric mean of a completion's prox/q does not grow with its length. Completions outside the band
    count nothing, and the divisor counts them all the same.

    Source: https://richardli.xyz/rl-collapse, part 3; AReaL's rejection of sequences, and its upper bound.
    """
    correction = _log_correction(batch)
    log_ratio = batch.token_mean(correction)[:, None]
    inside = within_band(log_ratio, least=options.least, most=options.most)
    if options.veto > 0:
        inside = inside & without_outlier(correction, batch.mask, least=options.veto)[:, None]
    return _corrected(torch.where(inside, bounded_ratio(log_ratio), 0.0), batch, options)


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
    is_beyond = bounded_ratio(prox - q) > options.behaviour_cap
    if options.beyond_cap == "truncate":
        # As if the sampler had found the token as much less unlikely: prox/q is then the cap.
        q = torch.where(is_beyond, prox - math.log(options.behaviour_cap), q)
    surrogate = decoupled_surrogate(p, prox, q, _advantage(batch), **options.clips)
    loss, is_clipped = surrogate.loss, surrogate.is_clipped & batch.mask
    weight = bounded_ratio(prox - q) * bounded_ratio(p.detach() - prox)
    if options.beyond_cap == "mask":
        loss, weight = (torch.where(is_beyond, 0.0, values) for values in (loss, weight))
        is_clipped = (is_clipped | is_beyond) & batch.mask
    is_cut = is_beyond & batch.mask & ~is_clipped if options.beyond_cap == "truncate" else None
    return ObjectiveOutcome(mean_over_tokens(loss, batch), weight, is_clipped, is_truncated=is_cut)


def dppo_tv(batch: ObjectiveBatch, options: TotalVariationOptions) -> ObjectiveOutcome:
    """Divergence PPO: -rho A for tokens whose probability has not moved too far, plus c log^2 rho everywhere.

    Source: arXiv:2602.04879, section 4.
    """
    advantage, log_ratio = _advantage(batch), batch.log_ratio
    inside = within_total_variation(
        batch.learner_logprob, batch.behaviour_logprob, advantage, limit=options.limit
    )
    weight = bounded_ratio(torch.where(inside, log_ratio, 0.0))
    taught = mean_over_tokens(torch.where(inside, -weight * advantage[:, None], 0.0), batch)
    loss = taught + options.penalty * mean_over_tokens(log_ratio**2, batch)
    return ObjectiveOutcome(loss, bounded_ratio(log_ratio.detach()), ~inside & batch.mask, taught=taught)


def _advantage(batch: ObjectiveBatch) -> Tensor:
    return standardised_advantage(batch.reward, batch.groups).to(batch.learner_logprob.dtype)


def _log_correction(batch: ObjectiveBatch) -> Tensor:
    """Return log prox/q, [n, t], 0 outside the mask, without gradient."""
    return batch.within(batch.proximal - batch.behaviour_logprob.detach().to(batch.proximal.dtype))


def _corrected(factor: Tensor, batch: ObjectiveBatch, options: ClipOptions) -> ObjectiveOutcome:
    """Return factor * min(u A, clip(u) A), u = p/prox; the factor, [n, t] or [n, 1], is data."""
    ratio = bounded_ratio(batch.within(batch.learner_logprob - batch.proximal))
    surrogate = clipped_surrogate(ratio, _advantage(batch), **options.clips)
    is_off = (surrogate.is_clipped | (factor == 0)) & batch.mask
    return ObjectiveOutcome(
        mean_of_token_means(factor * surrogate.loss, batch), factor * ratio.detach(), is_off
    )
