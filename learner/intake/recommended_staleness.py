"""Recommends a staleness bound: the age at which half of the effective sample size may be lost; pure.

    drift at each measured age, upper end --line between ages, square of age beyond--> KL at any staleness
    KL at a staleness --the objective's own weights of normal log ratios--> share of the effective sample size

What samplers' engines add to groups of an age counts as drift: it can only lower the bound. Derivation:
objective/README.md.
"""

from bisect import bisect_left
from collections.abc import Mapping
from typing import Final

import numpy as np

from learner.intake.divergence_panel import KNOTS, Estimate
from learner.objective.sample_size import WeighedSample
from node.values.run import RecommendedStaleness

LEAST_GROUPS: Final = 8
"""Remembered near an age, from which its drift counts as measured; its standard error says the rest."""

UPPER_ERRORS: Final = 2.0
"""Standard errors from the estimate to the end of its confidence interval that is used: 97.7 %, one-sided."""


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
