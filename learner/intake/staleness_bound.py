"""Recommends a staleness bound: the age at which half of the effective sample size may be lost; pure.

    drift at each measured age, upper end --line between ages, square of age beyond--> KL at any staleness
    KL at a staleness --the objective's own weights of normal log ratios--> share of the effective sample size

What samplers' engines add to groups of an age counts as drift: it can only lower the bound. Derivation:
objective/README.md.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from learner.intake.divergence_panel import KNOTS, Estimate
from learner.objective.losses.drift_aware import DriftAwareOptions
from learner.objective.menu import MENU
from learner.objective.options import ClipOptions, DecoupledOptions, TruncatedOptions
from node.values.run import RecommendedStaleness

LEAST_GROUPS: Final = 8
"""Remembered near an age, from which its drift counts as measured; its standard error says the rest."""

UPPER_ERRORS: Final = 2.0
"""Standard errors from the estimate to the end of its confidence interval that is used: 97.7 %, one-sided."""

_LARGEST_NATS: Final = 10.0
"""Nothing is left beyond, and e^nats is still a number."""

_GRID: Final = np.linspace(-12.0, 12.0, 4801)
"""Standard deviations at which the normal distribution is summed."""

_MASS: Final = np.exp(-(_GRID**2) / 2) / np.exp(-(_GRID**2) / 2).sum()

Ratios = NDArray[np.float64]
Weights = Callable[[Ratios], Ratios]
"""From p/q of tokens to their weights."""

_CLIPPED: Final = ("grpo", "dr_grpo", "bnpo", "dapo", "rloo", "reinforce_plus_plus")


@dataclass(frozen=True, slots=True)
class WeighedSample:
    """The sample whose effective size matters to the objective in use."""

    name: str
    """For people."""
    share: Callable[[float, float], float] | None
    """From KL(behaviour || learner), nats a token, >= 0, and the tokens of a typical completion to the
    expected effective sample size over the sample's size, in [0, 1]. None: not known of this objective."""

    @classmethod
    def of(cls, objective: str, options: Mapping[str, Any]) -> Self:
        """Choose by the objective as configured."""
        if objective == "topr" and not options.get("is_length_normalised"):
            return cls("whole completions", lambda nats, tokens: math.exp(-2 * tokens * nats))
        if objective not in MENU:
            return cls(objective, None)
        own = MENU[objective].options.model_validate(dict(options))
        if isinstance(own, DriftAwareOptions):
            most = own.most_nats
            return cls(
                "token weights", lambda nats, _: within_reach(nats, most) * token_share(nats, truncated(1))
            )
        if (of_tokens := _token_weights(objective, own)) is None:
            return cls(objective, None)
        return cls("token weights", lambda nats, _: token_share(nats, *of_tokens))


def _token_weights(objective: str, options: object) -> tuple[Weights, Weights] | None:
    """Return what an objective makes of p/q of good and of bad tokens, on the first step of a batch.

    None: its weights are means over completions, whose spread is not measured, or see more than a ratio.
    """
    if objective in _CLIPPED and isinstance(options, ClipOptions):
        least, most, dual = 1 - options.clip_low, 1 + options.clip_high, options.dual_clip
        return (
            lambda ratio: np.where(ratio <= most, ratio, 0.0),
            lambda ratio: np.where((ratio >= least) & (ratio <= dual), ratio, 0.0),
        )
    if objective == "cispo" and isinstance(options, ClipOptions):
        low, high = 1 - options.clip_low, 1 + options.clip_high
        return (lambda ratio: ratio.clip(low, high),) * 2
    if isinstance(options, TruncatedOptions):
        return (truncated(options.ceiling),) * 2
    if isinstance(options, DecoupledOptions) and options.proximal == "recomputed":
        cap, beyond = options.behaviour_cap, 0.0 if options.beyond_cap == "mask" else options.behaviour_cap
        return (lambda ratio: np.where(ratio > cap, beyond, ratio),) * 2
    return None


def truncated(ceiling: float) -> Weights:
    """Return the weights min(p/q, ceiling)."""
    return lambda ratio: ratio.clip(max=ceiling)


def token_share(nats: float, good: Weights, bad: Weights | None = None) -> float:
    """Return (E w)^2 / E w^2 under q, half of the tokens good, log p/q normal with mean -d and variance 2d.

    d is ``nats``, KL(q || p) a token; ``bad`` None: weights see no advantage. 0 where every weight is.
    """
    nats = min(max(nats, 0.0), _LARGEST_NATS)
    ratio = np.exp(math.sqrt(2 * nats) * _GRID - nats)
    weights = np.stack([good(ratio), (bad or good)(ratio)])
    square = float((weights**2 @ _MASS).mean())
    return float((weights @ _MASS).mean()) ** 2 / square if square else 0.0


def within_reach(nats: float, most_nats: float) -> float:
    """Return the share of completions that the default's trust region does not leave alone.

    1 - (P(m > h) + P(m < -h)) / 2 with m normal, mean -d and variance 2d: the mean log ratio of a completion
    whose tokens move together, which is the most that it can spread, and advantages of either sign. h is
    taken to be what tokens of the age spread, sqrt(2d), up to its end.
    """
    nats = min(max(nats, 0.0), _LARGEST_NATS)
    if not nats:
        return 1.0
    spread = math.sqrt(2 * nats)
    limit = min(spread, most_nats)
    return 1 - (_normal((-limit - nats) / spread) + _normal((nats - limit) / spread)) / 2


def recommended_staleness(
    drift: Mapping[int, Estimate], *, sample: WeighedSample, tokens: float
) -> RecommendedStaleness:
    """Return the largest staleness at which half of the effective sample size is expected to be left.

    ``drift`` is by age in versions, of every age with LEAST_GROUPS groups, 0 at age 0; ``tokens`` are of a
    typical completion.
    """
    if (share := sample.share) is None:
        because = f"what the weights of {sample.name} leave of a sample is not known"
        return RecommendedStaleness(None, sample.name, because)
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
        return share(beyond * float(np.interp(staleness, ages, upper)), tokens) < 0.5

    return RecommendedStaleness(bisect_left(range(1, KNOTS[-1] + 1), True, key=is_lost), sample.name)


def _upper_nats(drift: Estimate) -> float:
    return max(drift.nats, 0.0) + UPPER_ERRORS * drift.error_nats


def _normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))
