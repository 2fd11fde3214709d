"""Options of each objective; free of torch, so that a wrong value is reported at once.

Defaults are the published ones, unless an option says otherwise.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from learner.objective.sample_size import WeighedSample

StalenessDiscount = Literal["none", "exponential", "polynomial", "sample_size"]
"""The outer factor: how a group's age, or what its weights leave of it, enters the loss."""


class Options(BaseModel):
    """Base class of all options; has none itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True)
class MenuEntry:
    """An objective's place, and all that must be known of it before torch is imported."""

    path: str
    """``package.module:function``"""
    options: type[Options] = Options
    is_separable: bool = True
    """Whether the gradient of a row depends on no other row's learner logprobs; rewards, behaviour
    logprobs and masks of the whole batch are data, and may be used."""
    sample: Callable[[Any], WeighedSample | None] = lambda options: None
    """From its options to what its weights leave of a sample, by which `status` recommends a staleness bound.
    None: not known, since they are means over completions, whose spread is not measured, or see more than
    a ratio."""


class ClipOptions(Options):
    """A clipped surrogate."""

    clip_low: float = Field(default=0.2, gt=0, le=1)
    """Lower clip bound: stop pushing a bad completion or token down once its weight is below 1 - clip_low.
    1 disables it."""

    clip_high: float = Field(default=0.2, gt=0)
    """Upper clip bound: stop pushing a good completion or token up once its weight is above 1 + clip_high.
    inf disables it."""

    dual_clip: float = Field(default=math.inf, gt=1)
    """Ignore a bad completion or token once its weight is above this, so that no outlier can dominate the
    gradient. Published: 3. inf disables it."""

    @property
    def clips(self) -> dict[str, float]:
        """The arguments of ``formulas.surrogate.clipped_surrogate``."""
        return {"clip_low": self.clip_low, "clip_high": self.clip_high, "dual_clip": self.dual_clip}


class GepoPlusOptions(ClipOptions):
    """GEPO with the plain ratio for completions whose divergence is small."""

    threshold_nats: float = Field(default=0.01, ge=0)
    """Divergence per token below which a completion gets the plain ratio. 0: GEPO; inf: always plain."""


class DefensiveOptions(ClipOptions):
    """A denominator that mixes p into q."""

    learner_share: float = Field(default=0.2, gt=0, lt=1)
    """Share of p; no weight exceeds 1 / learner_share. Higher is steadier, but sees less of how unlikely q
    found a completion."""


class GatedOptions(ClipOptions):
    """GRPO on policy; the denominator and the gate change as the group's plain weights diverge."""

    gate: Literal["fading", "always", "none"] = "fading"
    """Whether rare failures count less and rare successes more: as divergence grows; on policy too, which is
    steadier from scratch and slower after pretraining; or never."""

    temperature: float = Field(default=1.0, gt=0)
    """eta of the gate; higher gates less."""


class VersionAwareOptions(GatedOptions):
    """A denominator that moves from q_i to the group's expectation as the effective sample size falls."""

    power: float = Field(default=3.0, gt=0)
    """Exponent of 1 - ESS/size. 1 trusts the group at the first sign of divergence: least variance, most
    bias; higher waits until few completions carry the plain weights."""


class VersionAwareKlOptions(GatedOptions):
    """A denominator that moves from q_i to the group's expectation with a completion's divergence."""

    scale_nats: float = Field(default=0.5, gt=0)
    """Divergence per token at which 63 % of the trust in q_i is lost. Lower trusts the group earlier."""

    power: float = Field(default=3.0, gt=0)
    """Exponent of the share that is lost; higher waits until little is left."""


class GspoOptions(ClipOptions):
    """GSPO clips tightly: the geometric mean of token ratios stays near 1."""

    clip_low: float = Field(default=3e-4, gt=0, le=1)
    """As in ClipOptions."""

    clip_high: float = Field(default=4e-4, gt=0)
    """As in ClipOptions."""


class DapoOptions(ClipOptions):
    """DAPO: clip higher, drop groups that teach nothing, penalise overlong completions."""

    clip_high: float = Field(default=0.28, gt=0)
    """As in ClipOptions."""

    overlong_buffer_share: float = Field(default=0.2, ge=0, le=1)
    """Last part of the token limit over which up to 1 is taken from the reward; 0: nothing."""

    drops_uninformative: bool = True
    """Whether groups of equal rewards are left out of the divisor too (dynamic sampling)."""


class CispoOptions(ClipOptions):
    """CISPO bounds the weight and drops no token; as published, only from above."""

    clip_low: float = Field(default=1.0, gt=0, le=1)
    """Weights are at least 1 - clip_low."""

    clip_high: float = Field(default=4.0, gt=0)
    """Weights are at most 1 + clip_high."""


class TruncatedOptions(ClipOptions):
    """TIS: GRPO against the proximal policy, times prox/q up to a ceiling."""

    ceiling: float = Field(default=2.0, gt=0)
    """Largest prox/q of a token that counts as it is."""


class GeometricMaskedOptions(ClipOptions):
    """Geometric MIS: GRPO against the proximal policy, times a completion's mean prox/q within a band."""

    least: float = Field(default=0.0, ge=0)
    """Lower end of the band. Against an engine's rounding, not staleness, 0.9999 is published."""

    most: float = Field(default=5.0, gt=0)
    """Upper end of the band. Against an engine's rounding, not staleness, 1.0001 is published."""

    veto: float = Field(default=0.0, ge=0)
    """Drop a completion if prox/q of any of its tokens is below this; slime: 1e-4. 0: never."""


class DecoupledOptions(ClipOptions):
    """Decoupled PPO."""

    proximal: Literal["recomputed", "log_linear"] = "recomputed"
    """The policy that the step is clipped to: the learner at the start of the batch, or the version
    before it as interpolated between p and q."""

    behaviour_cap: float = Field(default=math.inf, gt=0)
    """Largest prox/q of a token that counts; AReaL's code long had 5. inf: the published formula."""

    beyond_cap: Literal["mask", "truncate"] = "mask"
    """Whether tokens beyond the cap count nothing, or as much as the cap."""


class TotalVariationOptions(Options):
    """DPPO with total variation."""

    limit: float = Field(default=0.2, gt=0, lt=1)
    """Largest distance of p from q, in probability, the way a token is pushed."""

    penalty: float = Field(default=1e-3, ge=0)
    """Weight of log^2 ratio in the loss."""


class DelightOptions(Options):
    """DG."""

    temperature: float = Field(default=1.0, gt=0)
    """eta; higher gates less."""
