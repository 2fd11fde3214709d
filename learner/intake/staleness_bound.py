"""Recommends a staleness bound: the age at which half of the effective sample size may be lost; pure.

    drift at each measured age, upper end --line between ages, square of age beyond--> KL at any staleness
    KL at a staleness --what the objective weighs--> share of the effective sample size

What samplers' engines add to groups of an age counts as drift: it can only lower the bound. Derivation:
objective/README.md.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from learner.intake.divergence_panel import KNOTS, Estimate
from learner.objective.drift import LEAST_MOVE_NATS
from learner.objective.options import DriftAwareOptions
from node.run import RecommendedStaleness

LEAST_GROUPS: Final = 8
"""Remembered near an age, from which its drift counts as measured; its standard error says the rest."""

UPPER_ERRORS: Final = 2.0
"""Standard errors from the estimate to the end of its confidence interval that is used: 97.7 %, one-sided."""

_LARGEST_NATS: Final = 10.0
"""Nothing is left beyond, and e^nats is still a number."""


@dataclass(frozen=True, slots=True)
class WeighedSample:
    """The sample whose effective size matters to the objective in use."""

    drift_aware: DriftAwareOptions | None
    """The default's options: its token weights count. None: another objective; whole completions count."""

    @classmethod
    def of(cls, objective: str, options: Mapping[str, Any]) -> Self:
        """Choose by the objective as configured."""
        is_default = objective == "drift_aware"
        return cls(DriftAwareOptions.model_validate(dict(options)) if is_default else None)

    @property
    def name(self) -> str:
        """For people."""
        return "whole completions" if self.drift_aware is None else "token weights"

    def share(self, nats: float, *, tokens: float) -> float:
        """Return the expected effective sample size over the sample's size, in (0, 1].

        ``nats`` is KL(behaviour || learner) a token, ``tokens`` of a typical completion; log ratios are
        taken to be normal.
        """
        nats = min(max(nats, 0.0), _LARGEST_NATS)
        if self.drift_aware is None:
            return math.exp(-2 * tokens * nats)
        trust = -math.expm1(-tokens * nats / self.drift_aware.scale_nats)
        return share_within_reach(nats, self.drift_aware) * token_weight_share(nats, trust=trust)


def token_weight_share(nats: float, *, trust: float) -> float:
    """Return (E w)^2 / E w^2 under q of w = min(1, p/q)^f, log p/q normal with mean -d and variance 2d.

    E w^k = P(-s/2) + exp(-kf (1 - kf) d) P((1/2 - kf) s), s = sqrt(2d), P the normal distribution function;
    d is ``nats``, KL(q || p) a token, f is ``trust``, in [0, 1].
    """
    spread = math.sqrt(2 * nats)

    def moment(power: float) -> float:
        below = math.exp(-power * (1 - power) * nats) * _normal((0.5 - power) * spread)
        return _normal(-spread / 2) + below

    return moment(trust) ** 2 / moment(2 * trust)


def share_within_reach(nats: float, options: DriftAwareOptions) -> float:
    """Return the share of completions that the default's trust region does not leave alone.

    1 - (P(m > h) + P(m < -h)) / 2 with m normal, mean -d and variance 2d: the mean log ratio of a completion
    whose tokens move together, which is the most that it can spread, and advantages of either sign. d is
    ``nats``, KL(q || p) a token, as measured too; the options give h, see ``drift.largest_move``.
    """
    if not nats:
        return 1.0
    spread = math.sqrt(2 * nats)
    limit = min(max(options.deviations * spread, LEAST_MOVE_NATS), options.most_nats)
    return 1 - (_normal((-limit - nats) / spread) + _normal((nats - limit) / spread)) / 2


def recommended_staleness(
    drift: Mapping[int, Estimate], *, sample: WeighedSample, tokens: float
) -> RecommendedStaleness:
    """Return the largest staleness at which half of the effective sample size is expected to be left.

    ``drift`` is by age in versions, of every age with LEAST_GROUPS groups, 0 at age 0; ``tokens`` are of a
    typical completion.
    """
    if len(drift) < 2:
        because = (
            f"nearly all groups trained on were about {min(drift)} versions old, and one age cannot tell the "
            "drift of the policy from what the samplers' engines add"
            if drift
            else f"the learner has not trained on {LEAST_GROUPS} groups of one age since it started"
        )
        return RecommendedStaleness(None, sample.name, because)
    ages = np.array(sorted(drift), np.float64)
    upper = np.array([_upper_nats(drift[age]) for age in sorted(drift)])
    upper = np.minimum.accumulate(upper[::-1])[::-1]  # an older token has drifted no less
    if ages[0] > 0:
        ages, upper = np.append(0.0, ages), np.append(0.0, upper)

    def is_lost(staleness: int) -> bool:
        beyond = max(staleness / float(ages[-1]), 1.0) ** 2
        return sample.share(beyond * float(np.interp(staleness, ages, upper)), tokens=tokens) < 0.5

    return RecommendedStaleness(bisect_left(range(1, KNOTS[-1] + 1), True, key=is_lost), sample.name)


def _upper_nats(drift: Estimate) -> float:
    return max(drift.nats, 0.0) + UPPER_ERRORS * drift.error_nats


def _normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))
