"""The default objective: one weight a completion, truncated at 1, and a trust region that grows with age.

    m_i = mean over tokens of log p_t / q_t
    w_i = min(1, exp m_i)
    h_i = c sqrt(age_i), within c and an upper bound: how far a completion may have moved

Derivation and measurements: README.md.
"""

from typing import Final

import torch
from torch import Tensor

from learner.objective.advantage import centred_advantage, standardised_advantage
from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome, mean_of_token_means
from learner.objective.importance import geometric_mean_weight
from learner.objective.options import DriftAwareOptions

HELD_NATS: Final = 2.0
"""A token counts at most this in how far its completion moved: an outlier among eight moves it by 0.25."""


def drift_aware(batch: ObjectiveBatch, options: DriftAwareOptions) -> ObjectiveOutcome:
    """Return GRPO with one weight a completion, and a trust region for completions by their age.

    A completion of advantage A counts -A w, unless it has moved by h the way A pushes it. Where p = q, w = 1
    and nothing has moved. Neither w nor h looks at single tokens, so the many that decide nothing cancel out,
    as they do on policy.

    Source: README.md in this folder.
    """
    log_ratio = batch.log_ratio
    of_rewards = standardised_advantage if options.divides_by_deviation else centred_advantage
    advantage = of_rewards(batch.reward, batch.groups)
    limit = largest_move(
        batch.staleness_versions, per_root_version=options.move_nats, most_nats=options.most_nats
    )
    is_over = has_moved(log_ratio, batch.mask, advantage, limit=limit)
    ratio = geometric_mean_weight(log_ratio.detach(), batch.mask)
    weight = torch.where(is_over, 0.0, ratio.clamp(max=1))
    now = torch.exp(batch.within(batch.learner_logprob - batch.learner_logprob.detach()))
    loss = -(weight * advantage.to(weight.dtype))[:, None] * now
    return ObjectiveOutcome(
        mean_of_token_means(loss, batch),
        weight,
        is_over,
        is_truncated=((ratio > 1) & ~is_over)[:, None] & batch.mask,
    )


def largest_move(staleness_versions: Tensor, *, per_root_version: float, most_nats: float) -> Tensor:
    """Return how far a completion's mean log ratio may have moved, nats a token, by age: [n], float64.

    c sqrt(age), at least c and at most ``most_nats``: a random walk of the policy, whose steps move log p/q
    of a token by c, ``per_root_version``.
    """
    age = staleness_versions.detach().double().clamp(min=1)
    return (per_root_version * age.sqrt()).clamp(max=most_nats)


def has_moved(log_ratio: Tensor, mask: Tensor, advantage: Tensor, *, limit: Tensor) -> Tensor:
    """Return which completions have already moved by ``limit`` the way they are pushed: [n], bool.

    Args:
        log_ratio: [n, t], nats, log p/q; each is held within ``HELD_NATS``.
        mask: [n, t]
        advantage: [n]
        limit: [n], nats a token.
    """
    held = torch.where(mask, log_ratio.detach().double().clamp(-HELD_NATS, HELD_NATS), 0.0)
    mean = held.sum(dim=1) / mask.sum(dim=1)
    return ((advantage > 0) & (mean > limit)) | ((advantage < 0) & (mean < -limit))
