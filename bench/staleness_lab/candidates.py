"""Objectives on trial that the registry does not have; made of its parts, loaded by import path."""

from pydantic import Field

from learner.objective.advantage import standardised_advantage
from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome
from learner.objective.gates import delight_gate
from learner.objective.importance import expectation_weight, log_group_expectation
from learner.objective.options import VersionAwareOptions
from learner.objective.reduction import mean_over_groups
from learner.objective.surrogate import clipped_surrogate
from learner.objective.version_aware import log_version_aware_denominator, trust_by_sample_size


class DelightedOptions(VersionAwareOptions):
    """Version-aware weights, and DG's gate."""

    temperature: float = Field(default=1.0, gt=0)
    """eta; higher gates less."""


def version_aware_delight(batch: ObjectiveBatch, options: DelightedOptions) -> ObjectiveOutcome:
    """Version-aware weight and clip on GRPO's advantage times DG's gate.

    The weight answers for old policies; the gate keeps rare failures, which say little, from pushing
    a policy into a corner: what plain weights, 1 on policy, suffer from.
    """
    groups, behaviour, learner = batch.groups, batch.behaviour_mean, batch.learner_mean
    trust = trust_by_sample_size(learner - behaviour, groups, power=options.power)
    denominator = log_version_aware_denominator(behaviour, log_group_expectation(behaviour, groups), trust)
    weight = expectation_weight(learner, denominator)
    advantage = standardised_advantage(batch.reward, groups)
    gate = delight_gate(learner.unsqueeze(1), advantage, temperature=options.temperature).squeeze(1)
    surrogate = clipped_surrogate(
        weight, advantage * gate, clip_low=options.clip_low, clip_high=options.clip_high
    )
    return ObjectiveOutcome(mean_over_groups(surrogate.loss, batch), weight.detach(), surrogate.is_clipped)
