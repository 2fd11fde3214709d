"""Objectives with one weight a completion."""

import torch

from learner.objective.advantage import standardised_advantage
from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome
from learner.objective.options import GspoOptions
from learner.objective.reduction import mean_over_completions
from learner.objective.surrogate import clipped_surrogate


def gspo(batch: ObjectiveBatch, options: GspoOptions) -> ObjectiveOutcome:
    """Group sequence policy optimization: the geometric mean of token ratios, clipped tightly.

    Source: arXiv:2507.18071, eq. 5-7.
    """
    weight = torch.exp(batch.token_mean(batch.log_ratio))
    advantage = standardised_advantage(batch.reward, batch.groups)
    surrogate = clipped_surrogate(weight, advantage, clip_low=options.clip_low, clip_high=options.clip_high)
    loss = mean_over_completions(surrogate.loss, batch)
    return ObjectiveOutcome(loss, weight.detach(), surrogate.is_clipped)
