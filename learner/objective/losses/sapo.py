"""Soft adaptive policy optimization."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pydantic import Field

from learner.objective.options import MenuEntry, Options

if TYPE_CHECKING:
    from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome

_FLAT: Final = 40.0
"""Beyond it 1 / cosh^2 is 0, and cosh^2 not yet infinite in float32."""


class SapoOptions(Options):
    """SAPO: how fast the gate closes on both sides of a ratio of 1."""

    rate_good: float = Field(default=1.0, gt=0)
    """tau where the advantage is above 0."""

    rate_bad: float = Field(default=1.05, gt=0)
    """tau elsewhere; larger than rate_good, because pushing down moves mass to tokens nobody asked for."""


def sapo(batch: ObjectiveBatch, options: SapoOptions) -> ObjectiveOutcome:
    """Soft adaptive policy optimization: GRPO whose clip is a gate that closes gradually.

    Source: arXiv:2511.20347, eq. 5-6.
    """
    import torch

    from learner.objective.batch import ObjectiveOutcome, mean_of_token_means
    from learner.objective.formulas.advantage import standardised_advantage
    from learner.objective.formulas.log_ratio import bounded_ratio
    from learner.objective.formulas.surrogate import soft_gated_surrogate

    ratio = bounded_ratio(batch.log_ratio)
    advantage = standardised_advantage(batch.reward, batch.groups)
    surrogate = soft_gated_surrogate(ratio, advantage, rate_good=options.rate_good, rate_bad=options.rate_bad)
    rate = ratio.new_tensor([options.rate_bad, options.rate_good])[(advantage > 0).long()][:, None]
    weight = ratio.detach() / torch.cosh((rate * (ratio.detach() - 1) / 2).clamp(max=_FLAT)) ** 2
    return ObjectiveOutcome(mean_of_token_means(surrogate.loss, batch), weight, torch.zeros_like(batch.mask))


ENTRY: Final = MenuEntry(f"{__name__}:sapo", SapoOptions)
