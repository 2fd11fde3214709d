"""Objectives whose weight has the group's expectation in its denominator.

All work on mean token log-probabilities and centred rewards; the batch loss is the mean over
groups of the mean over completions.
"""

from torch import Tensor

from learner.objective.advantage import centred_advantage
from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome
from learner.objective.importance import expectation_weight, log_group_expectation
from learner.objective.options import ClipOptions
from learner.objective.reduction import mean_over_groups
from learner.objective.surrogate import clipped_surrogate


def gepo(batch: ObjectiveBatch, options: ClipOptions) -> ObjectiveOutcome:
    """Group expectation policy optimization: p_i / (sum_j q_j^2 / sum_j q_j), clipped.

    Source: arXiv:2508.17850, eq. 2-3.
    """
    expectation = log_group_expectation(batch.behaviour_mean, batch.groups)
    return _clipped(expectation_weight(batch.learner_mean, expectation), batch, options)


def _clipped(weight: Tensor, batch: ObjectiveBatch, options: ClipOptions) -> ObjectiveOutcome:
    advantage = centred_advantage(batch.reward, batch.groups)
    surrogate = clipped_surrogate(weight, advantage, clip_low=options.clip_low, clip_high=options.clip_high)
    return ObjectiveOutcome(mean_over_groups(surrogate.loss, batch), weight.detach(), surrogate.is_clipped)
