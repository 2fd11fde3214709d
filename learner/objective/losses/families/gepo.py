"""GEPO and version_aware: objectives whose denominator looks at the group, always or only where it must.

All work on mean token log-probabilities with a clipped surrogate; the batch loss is the mean over
groups of the mean over completions. GEPO and its variants centre rewards; the version-aware ones
also divide by the group's standard deviation, so that on policy their gradient is GRPO's.
"""

import torch
from torch import Tensor

from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome, mean_over_groups
from learner.objective.formulas.advantage import centred_advantage, standardised_advantage
from learner.objective.formulas.divergence import completion_divergence
from learner.objective.formulas.importance import (
    expectation_weight,
    log_defensive_mixture,
    log_expectation_where_far,
    log_expected_learner,
    log_group_expectation,
    log_group_mean,
    log_version_aware_denominator,
    trust_by_divergence,
    trust_by_sample_size,
)
from learner.objective.formulas.surrogate import clipped_surrogate
from learner.objective.formulas.trust_regions import fading_delight_gate
from learner.objective.options import (
    ClipOptions,
    DefensiveOptions,
    GatedOptions,
    GepoPlusOptions,
    VersionAwareKlOptions,
    VersionAwareOptions,
)


def gepo(batch: ObjectiveBatch, options: ClipOptions) -> ObjectiveOutcome:
    """Group expectation policy optimization: p_i / (sum_j q_j^2 / sum_j q_j).

    Source: arXiv:2508.17850, eq. 2-3.
    """
    return _over(log_group_expectation(batch.behaviour_mean, batch.groups), batch, options)


def gepo_mean(batch: ObjectiveBatch, options: ClipOptions) -> ObjectiveOutcome:
    """GEPO with the unbiased estimate of E_q[q]: p_i / mean_j q_j."""
    return _over(log_group_mean(batch.behaviour_mean, batch.groups), batch, options)


def gepo_plus(batch: ObjectiveBatch, options: GepoPlusOptions) -> ObjectiveOutcome:
    """GEPO for completions that the learner finds far, p_i / q_i for those it finds near."""
    denominator = log_expectation_where_far(
        batch.behaviour_mean,
        log_group_expectation(batch.behaviour_mean, batch.groups),
        completion_divergence(batch.learner_logprob, batch.behaviour_logprob, batch.mask),
        threshold=options.threshold_nats,
    )
    return _over(denominator, batch, options)


def gepo_defensive(batch: ObjectiveBatch, options: DefensiveOptions) -> ObjectiveOutcome:
    """p_i / (a p_i + (1 - a) q_i), the denominator data."""
    denominator = log_defensive_mixture(batch.learner_mean, batch.behaviour_mean, share=options.learner_share)
    return _over(denominator, batch, options)


def eqp(batch: ObjectiveBatch, options: ClipOptions) -> ObjectiveOutcome:
    """p_i / sum_j q-hat_j p_j, the gradient flowing through the denominator too."""
    denominator = log_expected_learner(batch.learner_mean, batch.behaviour_mean, batch.groups)
    return _over(denominator, batch, options)


def version_aware(batch: ObjectiveBatch, options: VersionAwareOptions) -> ObjectiveOutcome:
    """GRPO on policy; p_i / (q_i^(1-a) E^a) and a gate where the group's plain weights diverge.

    With f = 1 - ESS/size of the group, a = f^power moves the denominator and f fades the gate in.

    Source: README.md in this folder.
    """
    log_ratio = batch.learner_mean.detach() - batch.behaviour_mean
    lost = trust_by_sample_size(log_ratio, batch.groups, power=1.0)
    return _version_aware(lost**options.power, lost, batch, options)


def version_aware_kl(batch: ObjectiveBatch, options: VersionAwareKlOptions) -> ObjectiveOutcome:
    """The same with f = 1 - exp(-KL_i / scale) of each completion; it needs no other's learner logprobs.

    Source: README.md in this folder.
    """
    kl = completion_divergence(batch.learner_logprob, batch.behaviour_logprob, batch.mask)
    lost = trust_by_divergence(kl, scale_nats=options.scale_nats)
    return _version_aware(lost**options.power, lost, batch, options)


def _version_aware(
    trust: Tensor, lost: Tensor, batch: ObjectiveBatch, options: GatedOptions
) -> ObjectiveOutcome:
    groups, behaviour, learner = batch.groups, batch.behaviour_mean, batch.learner_mean
    denominator = log_version_aware_denominator(behaviour, log_group_expectation(behaviour, groups), trust)
    advantage = standardised_advantage(batch.reward, groups)
    share = {"fading": lost, "always": torch.ones_like(lost), "none": torch.zeros_like(lost)}[options.gate]
    gate = fading_delight_gate(learner, advantage, share, temperature=options.temperature)
    return _clipped(learner, denominator, advantage.to(gate.dtype) * gate, batch, options)


def _over(log_denominator: Tensor, batch: ObjectiveBatch, options: ClipOptions) -> ObjectiveOutcome:
    advantage = centred_advantage(batch.reward, batch.groups)
    return _clipped(batch.learner_mean, log_denominator, advantage, batch, options)


def _clipped(
    learner_mean: Tensor,
    log_denominator: Tensor,
    advantage: Tensor,
    batch: ObjectiveBatch,
    options: ClipOptions,
) -> ObjectiveOutcome:
    weight = expectation_weight(learner_mean, log_denominator)
    surrogate = clipped_surrogate(weight, advantage, **options.clips)
    return ObjectiveOutcome(mean_over_groups(surrogate.loss, batch), weight.detach(), surrogate.is_clipped)
