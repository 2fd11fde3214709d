r"""The default objective: weights and trust regions that follow the expected divergence of tokens by age.

    d_t                 KL(q || p) expected of a token, for the version that drew it and its sampler
    K_i                 of a completion: its own estimate and the sum of d_t, each by what it is worth
    f_i = 1 - exp(-K_i / scale)
    w_t = min(1, (p_t / q_t) (q_i / E))^f_i
    h_i = sqrt(2 mean_t d_t), within bounds: how far a completion's mean log ratio may have moved

Derivation and measurements: README.md.
"""

from typing import Final

import torch
from torch import Tensor

from learner.objective.advantage import standardised_advantage
from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome, mean_of_token_means
from learner.objective.divergence import kl_behaviour_learner
from learner.objective.importance import log_group_expectation, trust_by_divergence
from learner.objective.options import DriftAwareOptions

RECORD_TOKENS: Final = 2.0
"""Tokens of its own that the expected divergence of a completion is worth. The estimate of KL over T tokens
has a relative variance of 2/T where log ratios are normal; completions of one age differ by as much as they
show on average."""

HELD_NATS: Final = 2.0
"""A token's log ratio counts at most this in a completion's mean: an outlier among eight moves it by 0.25."""

LEAST_MOVE_NATS: Final = 0.03
"""Move that is allowed however little is expected: rounding between engine and learner, and the steps
that SFPO takes within one batch."""


def drift_aware(batch: ObjectiveBatch, options: DriftAwareOptions) -> ObjectiveOutcome:
    """Return GRPO with weights truncated at 1, and a trust region for completions, both by measured drift.

    A completion of advantage A and tokens t counts -A w_t, unless it has moved by h the way A pushes it. At
    age 0 and p = q, w_t = 1 and nothing has moved. What depends on a token (w_t) sees no advantage, and what
    sees the advantage (h) looks at whole completions, so the many tokens that decide nothing cancel out, as
    they do on policy.

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


def blended_divergence(measured: Tensor, expected: Tensor, tokens: Tensor) -> Tensor:
    """Return KL(q || p) of whole completions: their own estimates, shrunk towards what their age says.

    K = (T measured + 2 expected) / (T + 2), T tokens. One token's own estimate is mostly noise, that of a
    hundred tokens hardly is.

    Args:
        measured: [n], nats, sum over a completion's tokens of an estimate.
        expected: [n], nats, sum over its tokens of the divergence expected at their ages.
        tokens: T, [n].

    Returns:
        [n], nats, >= 0, float64, without gradient.
    """
    own = tokens.double() / (tokens.double() + RECORD_TOKENS)
    return own * measured.detach().double() + (1 - own) * expected.detach().double()


def truncated_group_weight(log_ratio: Tensor, log_share: Tensor, trust: Tensor) -> Tensor:
    """Return min(1, (p_t / q_t) (q_i / E))^f: 1 on policy, and never more, so that no token can dominate.

    At f = 1 and one token it is GEPO's p/E, truncated at 1. In long completions q_i / E is near 1, and what
    is left is token-level importance sampling, truncated at 1. It sees no reward: what it takes from tokens
    that decide nothing, it takes from good and bad completions alike.

    Args:
        log_ratio: [n, t], nats, log p/q.
        log_share: [n], nats per token, log q_i / E, see ``importance.log_group_expectation``.
        trust: f, [n], in [0, 1]: 0 uses no weights, 1 all of them.

    Returns:
        [n, t], in [0, 1], in the type of ``log_ratio``, without gradient.
    """
    dtype = log_ratio.dtype
    below = (log_ratio.detach() + log_share.detach().to(dtype)[:, None]).clamp(max=0)
    return torch.exp(trust.detach().to(dtype)[:, None] * below)


def largest_move(expected: Tensor, *, deviations: float, most_nats: float) -> Tensor:
    """Return how far a completion's mean log ratio may have moved: as far as single tokens of its age do.

    c sqrt(2 d), within 0.03 and ``most_nats``, [n], nats a token, with d, [n], the expected divergence and c
    ``deviations``. Where log ratios are normal, a divergence of d nats a token is a standard deviation of
    sqrt(2 d).
    """
    move = deviations * torch.sqrt(2 * expected.detach().double())
    return move.clamp(min=LEAST_MOVE_NATS).clamp(max=most_nats)


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
