"""Objectives with one weight a token."""

from learner.objective.advantage import standardised_advantage
from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome
from learner.objective.options import ClipOptions
from learner.objective.reduction import mean_of_token_means
from learner.objective.surrogate import clipped_surrogate


def grpo(batch: ObjectiveBatch, options: ClipOptions) -> ObjectiveOutcome:
    """Group relative policy optimization: clipped token ratios, standardised rewards.

    Source: arXiv:2402.03300, eq. 3.
    """
    weight = batch.log_ratio.exp()
    advantage = standardised_advantage(batch.reward, batch.groups)
    surrogate = clipped_surrogate(weight, advantage, clip_low=options.clip_low, clip_high=options.clip_high)
    loss = mean_of_token_means(surrogate.loss, batch)
    return ObjectiveOutcome(loss, weight.detach(), surrogate.is_clipped & batch.mask)
