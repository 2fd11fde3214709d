"""GRPO, Dr. GRPO, DAPO, RLOO: near kin, which differ in advantage and divisor; and plain REINFORCE, DG."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from learner.objective.batch import (
    ObjectiveBatch,
    ObjectiveOutcome,
    mean_of_token_means,
    mean_over_budget,
    mean_over_kept_tokens,
    mean_over_tokens,
)
from learner.objective.formulas.advantage import (
    centred_advantage,
    leave_one_out_advantage,
    overlong_penalty,
    standardised_advantage,
    whitened_advantage,
)
from learner.objective.formulas.log_ratio import bounded_ratio
from learner.objective.formulas.surrogate import clipped_surrogate, likelihood_loss
from learner.objective.formulas.trust_regions import delight_gate
from learner.objective.options import ClipOptions, DapoOptions, DelightOptions, Options


def grpo(batch: ObjectiveBatch, options: ClipOptions) -> ObjectiveOutcome:
    """Group relative policy optimization.

    Source: arXiv:2402.03300, eq. 3.
    """
    return _clipped(standardised_advantage(batch.reward, batch.groups), mean_of_token_means, batch, options)


def dr_grpo(batch: ObjectiveBatch, options: ClipOptions) -> ObjectiveOutcome:
    """GRPO done right: neither rewards nor lengths are normalised by what was drawn.

    Source: arXiv:2503.20783, section 3.
    """
    return _clipped(centred_advantage(batch.reward, batch.groups), mean_over_budget, batch, options)


def bnpo(batch: ObjectiveBatch, options: ClipOptions) -> ObjectiveOutcome:
    """GRPO over the tokens of the whole batch, which TRL calls ``bnpo``."""
    return _clipped(standardised_advantage(batch.reward, batch.groups), mean_over_tokens, batch, options)


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


def _clipped(
    advantage: Tensor,
    reduce: Callable[[Tensor, ObjectiveBatch], Tensor],
    batch: ObjectiveBatch,
    options: ClipOptions,
) -> ObjectiveOutcome:
    weight = bounded_ratio(batch.log_ratio)
    surrogate = clipped_surrogate(weight, advantage, **options.clips)
    return ObjectiveOutcome(reduce(surrogate.loss, batch), weight.detach(), surrogate.is_clipped & batch.mask)


def _likelihood(weight: Tensor, batch: ObjectiveBatch) -> ObjectiveOutcome:
    advantage = centred_advantage(batch.reward, batch.groups)
    loss = mean_over_tokens(likelihood_loss(batch.learner_logprob, weight, advantage), batch)
    return ObjectiveOutcome(loss, weight, torch.zeros_like(batch.mask))
