"""Tapered off-policy REINFORCE."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from learner.objective.options import MenuEntry, Options
from learner.objective.sample_size import WeighedSample

if TYPE_CHECKING:
    from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome


class ToprOptions(Options):
    """TOPR has one choice."""

    is_length_normalised: bool = False
    """Whether ratio and likelihood are per token. As published, they are of whole completions: long bad ones
    that the learner finds less likely than the sampler did then count for almost nothing."""


def topr(batch: ObjectiveBatch, options: ToprOptions) -> ObjectiveOutcome:
    """Tapered off-policy REINFORCE: good completions count in full, bad ones min(p/q, 1).

    Source: arXiv:2503.14286, eq. 8.
    """
    import torch

    from learner.objective.batch import ObjectiveOutcome, mean_over_completions
    from learner.objective.formulas.advantage import centred_advantage
    from learner.objective.formulas.surrogate import likelihood_loss

    log_ratio, log_likelihood = batch.log_ratio.sum(dim=1), batch.within(batch.learner_logprob).sum(dim=1)
    if options.is_length_normalised:
        log_ratio, log_likelihood = log_ratio / batch.lengths, log_likelihood / batch.lengths
    advantage = centred_advantage(batch.reward, batch.groups)
    tapered = log_ratio.detach().clamp(max=0).exp()
    weight = torch.where(advantage >= 0, torch.ones_like(tapered), tapered)
    loss = mean_over_completions(likelihood_loss(log_likelihood, weight, advantage), batch)
    return ObjectiveOutcome(loss, weight, torch.zeros_like(weight, dtype=torch.bool))


def _sample(options: ToprOptions) -> WeighedSample | None:
    if options.is_length_normalised:
        return None
    return WeighedSample("whole completions", lambda nats, tokens: math.exp(-2 * tokens * nats))


ENTRY: Final = MenuEntry(f"{__name__}:topr", ToprOptions, sample=_sample)
