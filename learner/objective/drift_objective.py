"""The default: GRPO at age 0; beyond it, what the measured drift of the policy with age asks for."""

import torch

from learner.objective.advantage import standardised_advantage
from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome
from learner.objective.divergence import kl_behaviour_learner
from learner.objective.drift import blended_divergence, has_moved, largest_move, truncated_group_weight
from learner.objective.importance import log_group_expectation
from learner.objective.options import DriftAwareOptions
from learner.objective.reduction import mean_of_token_means
from learner.objective.version_aware import trust_by_divergence


def drift_aware(batch: ObjectiveBatch, options: DriftAwareOptions) -> ObjectiveOutcome:
    """Return GRPO with weights truncated at 1, and a trust region for completions, both by measured drift.

    A completion of advantage A and tokens t counts -A w_t, unless it has moved by h the way A pushes it;
    w_t and h as in ``drift``. At age 0 and p = q, w_t = 1 and nothing has moved. What depends on a
    token (w_t) sees no advantage, and what sees the advantage (h) looks at whole completions, so the many
    tokens that decide nothing cancel out, as they do on policy.

    Source: README.md in this folder.
    """
    log_ratio, expected = batch.log_ratio, batch.expected_divergence
    kl = batch.within(kl_behaviour_learner(log_ratio.detach(), torch.zeros_like(log_ratio)))
    divergence = blended_divergence(kl.double().sum(dim=1), expected * batch.lengths, batch.lengths)
    trust = trust_by_divergence(divergence, scale_nats=options.scale_nats)
    behaviour = batch.behaviour_mean
    log_share = behaviour - log_group_expectation(behaviour, batch.groups)
    weight = truncated_group_weight(log_ratio, log_share, trust)
    is_cut = (log_ratio.detach() + log_share.to(log_ratio.dtype)[:, None] > 0) & (trust > 0)[:, None]
    advantage = standardised_advantage(batch.reward, batch.groups)
    limit = largest_move(expected, deviations=options.deviations, most_nats=options.most_nats)
    is_over = has_moved(log_ratio, batch.mask, advantage, limit=limit)[:, None]
    weight = torch.where(is_over, 0.0, weight)
    now = torch.exp(batch.within(batch.learner_logprob - batch.learner_logprob.detach()))
    loss = -weight * advantage.to(weight.dtype)[:, None] * now
    return ObjectiveOutcome(
        mean_of_token_means(loss, batch),
        weight,
        is_over & batch.mask,
        is_truncated=is_cut & ~is_over & batch.mask,
        trust=trust,
    )
