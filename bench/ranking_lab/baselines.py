"""Other baselines than leave-one-out, as objectives of one's own, which the learner takes by import path.

All are ``rloo`` but for the advantage: the same ratios, the same clip, the same mean over positions.
"""

from collections.abc import Mapping
from typing import Final

from torch import Tensor

from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome, mean_over_tokens
from learner.objective.formulas.log_ratio import bounded_ratio
from learner.objective.formulas.surrogate import clipped_surrogate
from learner.objective.options import ClipOptions

LEAVE_ONE_OUT: Final = "leave-one-out"

OBJECTIVES: Final[Mapping[str, str]] = {
    LEAVE_ONE_OUT: "rloo",
    "batch mean": f"{__name__}:batch_mean",
    "none": f"{__name__}:without_baseline",
}
"""Baseline -> objective."""


def without_baseline(batch: ObjectiveBatch, options: ClipOptions) -> ObjectiveOutcome:
    """Weigh each ranking by its reward."""
    return _clipped(batch.reward, batch, options)


def batch_mean(batch: ObjectiveBatch, options: ClipOptions) -> ObjectiveOutcome:
    """Weigh each ranking by its reward minus the mean over all rankings of the step, its own among them."""
    return _clipped(batch.reward - batch.reward.mean(), batch, options)


for _objective in (without_baseline, batch_mean):
    _objective.is_separable = True  # type: ignore[attr-defined]


def _clipped(advantage: Tensor, batch: ObjectiveBatch, options: ClipOptions) -> ObjectiveOutcome:
    weight = bounded_ratio(batch.log_ratio)
    surrogate = clipped_surrogate(weight, advantage, **options.clips)
    loss = mean_over_tokens(surrogate.loss, batch)
    return ObjectiveOutcome(loss, weight.detach(), surrogate.is_clipped & batch.mask)
