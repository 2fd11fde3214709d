"""Objectives on tokens that differ in advantage, gate and divisor: token ratios, or plain likelihoods."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from learner.objective.advantage import (
    beta_normalised_advantage,
    centred_advantage,
    leave_one_out_advantage,
    overlong_penalty,
    soft_advantage,
    standardised_advantage,
    whitened_advantage,
)
from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome
from learner.objective.gates import (
    above_price,
    delight,
    delight_gate,
    within_sequence_divergence,
    within_top_share,
)
from learner.objective.log_ratio import bounded_ratio
from learner.objective.options import (
    ClipOptions,
    DapoOptions,
    DelightOptions,
    HardDelightOptions,
    KondoOptions,
    MirrorDescentOptions,
    Options,
    SapoOptions,
    SequenceMaskOptions,
)
from learner.objective.reduction import (
    mean_of_token_means,
    mean_over_budget,
    mean_over_kept_tokens,
    mean_over_tokens,
)
from learner.objective.surrogate import clipped_surrogate, likelihood_loss, soft_gated_surrogate

_FLAT: Final = 40.0
"""Beyond it 1 / cosh^2 is 0, and cosh^2 not yet infinite in float32."""


def grpo(batch: ObjectiveBatch, options: ClipOptions) -> ObjectiveOutcome:
    """Group relative policy optimization.

    Source: arXiv:2402.03300, eq. 3.
    """
    advantage = standardised_advantage(batch.reward, batch.groups)
    return _clipped(advantage, mean_of_token_means, batch, options)


def dr_grpo(batch: ObjectiveBatch, options: ClipOptions) -> ObjectiveOutcome:
    """GRPO done right: neither rewards nor lengths are normalised by what was drawn.

    Source: arXiv:2503.20783, section 3.
    """
    return _clipped(centred_advantage(batch.reward, batch.groups), mean_over_budget, batch, options)


def bnpo(batch: ObjectiveBatch, options: ClipOptions) -> ObjectiveOutcome:
    """GRPO over the tokens of the batch: what TRL calls ``bnpo``, taken over the whole batch."""
    return _clipped(standardised_advantage(batch.reward, batch.groups), mean_over_tokens, batch, options)


def bnpo_beta(batch: ObjectiveBatch, options: ClipOptions) -> ObjectiveOutcome:
    """Beta normalization policy optimization: rewards over a Beta density of the groups' mean rewards.

    Source: arXiv:2506.02864.
    """
    return _clipped(beta_normalised_advantage(batch.reward, batch.groups), mean_over_tokens, batch, options)


def dapo(batch: ObjectiveBatch, options: DapoOptions) -> ObjectiveOutcome:
    """Decoupled clip and dynamic sampling policy optimization.

    Source: arXiv:2503.14476, eq. 8 and 13.
    """
    groups = batch.groups
    penalty = overlong_penalty(
        batch.lengths, max_tokens=batch.max_tokens, buffer_share=options.overlong_buffer_share
    )
    advantage = standardised_advantage(batch.reward + penalty.to(batch.reward.dtype), groups)
    if not options.drops_uninformative:
        return _clipped(advantage, mean_over_tokens, batch, options)
    is_informative = groups.spread(groups.sum(centred_advantage(batch.reward, groups).abs()) > 0)

    def reduce(loss: Tensor, batch: ObjectiveBatch) -> Tensor:
        return mean_over_kept_tokens(loss, batch, keep=is_informative)

    outcome = _clipped(advantage, reduce, batch, options)
    return replace(outcome, is_clipped=outcome.is_clipped & is_informative[:, None])


def rloo(batch: ObjectiveBatch, options: ClipOptions) -> ObjectiveOutcome:
    """REINFORCE with the mean of the other completions as baseline, clipped where it is off policy.

    Source: arXiv:2402.14740.
    """
    return _clipped(leave_one_out_advantage(batch.reward, batch.groups), mean_over_tokens, batch, options)


def reinforce_plus_plus(batch: ObjectiveBatch, options: ClipOptions) -> ObjectiveOutcome:
    """REINFORCE++ with baseline: rewards centred in their groups, whitened over the batch.

    Source: arXiv:2501.03262.
    """
    return _clipped(whitened_advantage(batch.reward, batch.groups), mean_over_tokens, batch, options)


def sapo(batch: ObjectiveBatch, options: SapoOptions) -> ObjectiveOutcome:
    """Soft adaptive policy optimization: GRPO whose clip is a gate that closes gradually.

    Source: arXiv:2511.20347, eq. 5-6.
    """
    ratio = bounded_ratio(batch.log_ratio)
    advantage = standardised_advantage(batch.reward, batch.groups)
    surrogate = soft_gated_surrogate(ratio, advantage, rate_good=options.rate_good, rate_bad=options.rate_bad)
    rate = ratio.new_tensor([options.rate_bad, options.rate_good])[(advantage > 0).long()][:, None]
    weight = ratio.detach() / torch.cosh((rate * (ratio.detach() - 1) / 2).clamp(max=_FLAT)) ** 2
    return ObjectiveOutcome(mean_of_token_means(surrogate.loss, batch), weight, torch.zeros_like(batch.mask))


def opsm(batch: ObjectiveBatch, options: SequenceMaskOptions) -> ObjectiveOutcome:
    """Off-policy sequence masking: GRPO without the bad completions that the learner has left behind.

    Source: DeepSeek-V3.2, arXiv:2512.02556, eq. 9, whose advantage is not divided by a standard deviation.
    """
    advantage = standardised_advantage(batch.reward, batch.groups)
    stays = within_sequence_divergence(batch.log_ratio, batch.mask, advantage, limit=options.limit_nats)
    weight = bounded_ratio(batch.log_ratio)
    surrogate = clipped_surrogate(
        weight,
        advantage,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        dual_clip=options.dual_clip,
    )
    loss = torch.where(stays[:, None], surrogate.loss, 0.0)
    is_off = (surrogate.is_clipped | ~stays[:, None]) & batch.mask
    return ObjectiveOutcome(mean_of_token_means(loss, batch), stays[:, None] * weight.detach(), is_off)


def opmd(batch: ObjectiveBatch, options: MirrorDescentOptions) -> ObjectiveOutcome:
    """Online policy mirror descent: -(r - b) log p / (1 + tau); needs no behaviour logprob.

    Source: Trinity-RFT, arXiv:2505.17826; the loss of its code.
    """
    tau = options.temperature
    if options.baseline == "mean":
        advantage = centred_advantage(batch.reward, batch.groups)
    else:
        advantage = soft_advantage(batch.reward, batch.groups, temperature=tau)
    weight = torch.ones_like(batch.learner_logprob)
    loss = likelihood_loss(batch.learner_logprob, weight, advantage) / (1 + tau)
    return ObjectiveOutcome(mean_over_tokens(loss, batch), weight, torch.zeros_like(batch.mask))


def reinforce(batch: ObjectiveBatch, options: Options) -> ObjectiveOutcome:
    """-A log p, as if every completion were the learner's own."""
    return _likelihood(torch.ones_like(batch.learner_logprob), batch)


def dg(batch: ObjectiveBatch, options: DelightOptions) -> ObjectiveOutcome:
    """Delightful policy gradient: -sigmoid(U l / eta) U log p; needs no behaviour logprob.

    Source: arXiv:2603.14608.
    """
    advantage = centred_advantage(batch.reward, batch.groups).to(batch.learner_logprob.dtype)
    surprisal = batch.within(batch.learner_logprob)
    return _likelihood(delight_gate(surprisal, advantage, temperature=options.temperature), batch)


def dg_hard(batch: ObjectiveBatch, options: HardDelightOptions) -> ObjectiveOutcome:
    """DG at temperature 0: -U log p of the tokens whose delight U l exceeds a price.

    Source: arXiv:2603.20526, section 2.
    """
    return _kept(above_price(_delight(batch), price=options.price), batch)


def kondo(batch: ObjectiveBatch, options: KondoOptions) -> ObjectiveOutcome:
    """The Kondo gate: -U log p of the batch's most delightful tokens, over the number of all.

    Source: arXiv:2603.20526; divisor as in its authors' code, whose default share is 1.
    """
    return _kept(within_top_share(_delight(batch), batch.mask, share=options.share), batch)


def _delight(batch: ObjectiveBatch) -> Tensor:
    advantage = centred_advantage(batch.reward, batch.groups).to(batch.learner_logprob.dtype)
    return delight(batch.within(batch.learner_logprob), advantage)


def _kept(stays: Tensor, batch: ObjectiveBatch) -> ObjectiveOutcome:
    outcome = _likelihood(stays.to(batch.learner_logprob.dtype), batch)
    return replace(outcome, is_clipped=~stays & batch.mask)


def _clipped(
    advantage: Tensor,
    reduce: Callable[[Tensor, ObjectiveBatch], Tensor],
    batch: ObjectiveBatch,
    options: ClipOptions,
) -> ObjectiveOutcome:
    weight = bounded_ratio(batch.log_ratio)
    surrogate = clipped_surrogate(
        weight,
        advantage,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        dual_clip=options.dual_clip,
    )
    return ObjectiveOutcome(reduce(surrogate.loss, batch), weight.detach(), surrogate.is_clipped & batch.mask)


def _likelihood(weight: Tensor, batch: ObjectiveBatch) -> ObjectiveOutcome:
    advantage = centred_advantage(batch.reward, batch.groups)
    loss = mean_over_tokens(likelihood_loss(batch.learner_logprob, weight, advantage), batch)
    return ObjectiveOutcome(loss, weight, torch.zeros_like(batch.mask))
