"""The default objective: one weight a completion, truncated at 1, and a trust region that grows with age.

    m_i = mean over tokens of log p_t / q_t
    w_i = min(1, exp m_i)
    h_i = c sqrt(age_i), within c and an upper bound: how far a completion may have moved

Derivation and measurements: ``learner/objective/README.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pydantic import Field

from learner.objective.options import MenuEntry, Options
from learner.objective.sample_size import WeighedSample, token_share, truncated, within_reach

if TYPE_CHECKING:
    from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome


class DriftAwareOptions(Options):
    """GRPO with one weight a completion, at most 1, and a trust region that grows with its age."""

    move_nats: float = Field(default=0.03, gt=0)
    """How far a completion of age 1 may have moved the way it is pushed, nats a token, before it is left
    alone; at an age of n versions sqrt(n) times as far. Lower it if reward falls back while staleness is
    high, or if the learning rate is small; raise it if learning is slow."""

    most_nats: float = Field(default=0.5, gt=0)
    """Upper bound of that move, whatever the age. Lower it if drift keeps growing; raise it if it is flat
    and late groups teach too slowly."""

    divides_by_deviation: bool = True
    """Whether advantages are divided by the standard deviation of their group's rewards, as GRPO's are. If
    not, groups that all but agree count less: late groups teach more, wrong rewards do more harm. False only
    where rewards are graded and known to be right."""


def drift_aware(batch: ObjectiveBatch, options: DriftAwareOptions) -> ObjectiveOutcome:
    """Return GRPO with one weight a completion, and a trust region for completions by their age.

    A completion of advantage A counts -A w, unless it has moved by h the way A pushes it. Where p = q, w = 1
    and nothing has moved. Neither w nor h looks at single tokens, so the many that decide nothing cancel out,
    as they do on policy.

    Source: ``learner/objective/README.md``.
    """
    import torch

    from learner.objective.batch import ObjectiveOutcome, mean_of_token_means
    from learner.objective.formulas.advantage import centred_advantage, standardised_advantage
    from learner.objective.formulas.importance import geometric_mean_weight
    from learner.objective.formulas.trust_regions import has_moved, largest_move

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


def _sample(options: DriftAwareOptions) -> WeighedSample:
    most = options.most_nats
    return WeighedSample(
        "token weights", lambda nats, _: within_reach(nats, most) * token_share(nats, truncated(1))
    )


ENTRY: Final = MenuEntry(f"{__name__}:drift_aware", DriftAwareOptions, sample=_sample)
