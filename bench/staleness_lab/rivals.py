"""Objectives that the report compares and that the menu does not have, from their papers.

Not here: GAC (arXiv:2603.01501), a projection of each gradient on the one before, whose thresholds we could
not read.
"""

import torch
from pydantic import Field
from torch import Tensor

from learner.objective.batch import (
    ObjectiveBatch,
    ObjectiveOutcome,
    mean_over_completions,
    mean_over_tokens,
)
from learner.objective.formulas.advantage import centred_advantage, standardised_advantage
from learner.objective.formulas.log_ratio import bounded_ratio
from learner.objective.formulas.surrogate import likelihood_loss
from learner.objective.groups import Groups
from learner.objective.options import Options

_LEAST_DEVIATION = 1e-6


class M2poOptions(Options):
    """M2PO."""

    limit: float = Field(default=0.04, gt=0)
    """Largest mean of log^2 ratio over the tokens that stay."""


def m2po(batch: ObjectiveBatch, options: M2poOptions) -> ObjectiveOutcome:
    """Second-moment trust: -rho A without the tokens of largest log^2 rho in the batch.

    Source: arXiv:2510.01161, algorithm 1.
    """
    log_ratio = batch.log_ratio
    inside = within_second_moment(log_ratio, batch.mask, limit=options.limit)
    advantage = standardised_advantage(batch.reward, batch.groups).to(log_ratio.dtype)
    weight = bounded_ratio(torch.where(inside, log_ratio, 0.0))
    loss = mean_over_tokens(torch.where(inside, -weight * advantage[:, None], 0.0), batch)
    return ObjectiveOutcome(loss, bounded_ratio(log_ratio.detach()), ~inside & batch.mask)


def within_second_moment(log_ratio: Tensor, mask: Tensor, *, limit: float) -> Tensor:
    """Return which tokens stay: those of largest log^2 ratio go, until its mean over the rest is at most
    ``limit``.

    Equal squares stay or go together. [n, t], bool, False outside the mask, from [n, t].
    """
    squares = log_ratio.detach().double()[mask] ** 2
    ordered = squares.sort().values
    up_to = torch.searchsorted(ordered, squares, right=True)
    stays = ordered.cumsum(0)[up_to - 1] / up_to <= limit
    return torch.zeros_like(mask).masked_scatter(mask, stays)


class VcpoOptions(Options):
    """VCPO's loss; its learning-rate factor goes around it."""

    ceiling: float = Field(default=8.0, gt=0)
    """Largest p/q of a completion that counts as it is; the baseline always sees them whole."""


def vcpo(batch: ObjectiveBatch, options: VcpoOptions) -> ObjectiveOutcome:
    """Variance-controlled policy optimization: -sg[min(p/q, C)] A log p of whole completions, per token.

    A is the reward less the off-policy optimal baseline, divided by the deviation of the group's rewards.
    The baseline asks for the gradient's length, a backward pass for every completion; here its square is
    the number of tokens, as for tokens whose gradients are of one length and orthogonal (OPO,
    arXiv:2505.23585, section 3).

    Source: arXiv:2602.17616, section 4.
    """
    groups, log_ratio = batch.groups, batch.log_ratio.detach().sum(dim=1)
    advantage = off_policy_advantage(batch.reward, log_ratio, batch.lengths, groups)
    deviation = groups.spread(groups.mean(centred_advantage(batch.reward, groups) ** 2).sqrt())
    advantage = torch.where(deviation > _LEAST_DEVIATION, advantage / deviation, advantage)
    weight = bounded_ratio(log_ratio).clamp(max=options.ceiling)
    loss = mean_over_completions(likelihood_loss(batch.learner_mean, weight, advantage), batch)
    return ObjectiveOutcome(loss, weight, torch.zeros_like(weight, dtype=torch.bool))


def off_policy_advantage(reward: Tensor, log_weight: Tensor, squared_norm: Tensor, groups: Groups) -> Tensor:
    """Return each reward minus the baseline under which its group's weighted gradient varies least, [n].

    b = sum w^2 g^2 r / sum w^2 g^2, from log w, [n], nats, of whole completions, and g^2, [n], > 0, the
    squared length of each one's gradient.
    """
    log_share = 2 * log_weight.double() + squared_norm.double().log()
    share = torch.exp(log_share - groups.spread(groups.logsumexp(log_share))).to(reward.dtype)
    above_least = reward - groups.spread(groups.minimum(reward))
    return above_least - groups.spread(groups.sum(share * above_least))


class DrpoOptions(Options):
    """DRPO."""

    limit: float = Field(default=0.2, gt=0, lt=1)
    """Shift of a token's probability at which a push that moves it on is 0, and beyond which it pulls
    back."""


def drpo(batch: ObjectiveBatch, options: DrpoOptions) -> ObjectiveOutcome:
    """Divergence-regularised: -(rho A - |A| (p - q)^2 / (2 limit q)), so that a token is pushed by
    rho A (1 - sign(A) (p - q) / limit): less as it moves on, back once it has gone too far.

    Source: arXiv:2606.09821, by its description (an advantage-weighted quadratic regulariser on the shift of
    probability, weight 0 at DPPO's boundary and corrective beyond); ``limit`` is DPPO's.
    """
    rho = bounded_ratio(batch.log_ratio)
    advantage = standardised_advantage(batch.reward, batch.groups).to(rho.dtype)[:, None]
    q = batch.within(batch.behaviour_logprob.detach()).exp().to(rho.dtype)
    shift = q * (rho - 1)
    loss = -(rho * advantage - advantage.abs() * shift * (rho - 1) / (2 * options.limit))
    weight = rho.detach() * (1 - advantage.sign() * shift.detach() / options.limit)
    return ObjectiveOutcome(mean_over_tokens(loss, batch), weight, torch.zeros_like(batch.mask))
