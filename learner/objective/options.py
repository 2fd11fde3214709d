"""What can be set about each objective; free of torch, so that a wrong value is answered at once.

Defaults are the published ones, where there is a publication and nothing else is said.
"""

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

StalenessDiscount = Literal["none", "exponential", "polynomial", "sample_size"]
"""The outer factor: how a group's age, or what its weights leave of it, enters the loss."""


class Options(BaseModel):
    """No options; what the others have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ClipOptions(Options):
    """A clipped surrogate."""

    clip_low: float = Field(default=0.2, gt=0, le=1)
    """What is bad is pushed down until its weight is below 1 - this; 1: without end."""

    clip_high: float = Field(default=0.2, gt=0)
    """What is good is pushed up until its weight is above 1 + this; inf: without end."""

    dual_clip: float = Field(default=math.inf, gt=1)
    """What is bad has no gradient once its weight is above this, lest an outlier be the whole gradient;
    published: 3. inf: never."""


class GepoPlusOptions(ClipOptions):
    """GEPO with the plain ratio for completions that are near."""

    threshold_nats: float = Field(default=0.01, ge=0)
    """Divergence per token below which a completion is near. 0: GEPO; inf: the plain ratio."""


class DefensiveOptions(ClipOptions):
    """A denominator with a share of p in it."""

    learner_share: float = Field(default=0.2, gt=0, lt=1)
    """No weight exceeds 1 / this. Higher is steadier, and blinder to how unlikely q found a completion."""


class GatedOptions(ClipOptions):
    """GRPO on policy; what old policies call for comes in as the group's plain weights part."""

    gate: Literal["fading", "always", "none"] = "fading"
    """Whether failures that are rare by now count less, and rare successes more: as divergence grows,
    on policy too (steadier from scratch, slower after pretraining), or never."""

    temperature: float = Field(default=1.0, gt=0)
    """eta of the gate; higher gates less."""


class VersionAwareOptions(GatedOptions):
    """A denominator that moves from q_i to the group's expectation as the group's plain weights part."""

    power: float = Field(default=3.0, gt=0)
    """Of 1 - ESS/size. 1 trusts the group at the first sign of divergence: least variance, most bias;
    higher waits until few completions carry the plain weights."""


class VersionAwareKlOptions(GatedOptions):
    """A denominator that moves from q_i to the group's expectation with a completion's divergence."""

    scale_nats: float = Field(default=0.5, gt=0)
    """Divergence per token at which 63 % is lost. Lower trusts the group earlier."""

    power: float = Field(default=3.0, gt=0)
    """Of what is lost; higher waits until little is left."""


class DriftAwareOptions(Options):
    """GRPO on policy; weights and a trust region that follow the measured drift of the policy with age."""

    scale_nats: float = Field(default=2.0, gt=0)
    """KL of a whole completion at which 63 % of the correction is in effect. Raise it if old completions of a
    few tokens teach too little of rare successes; lower it if training on them is unstable."""

    deviations: float = Field(default=1.0, gt=0)
    """How far a completion may have moved the way it is pushed, in standard deviations of the log ratios of
    tokens of its age. Lower it if reward falls back while staleness is high; raise it if learning is slow."""

    most_nats: float = Field(default=0.5, gt=0)
    """Upper bound of that move, nats a token, whatever drift is measured. Lower it if measured drift keeps
    growing; raise it if drift is flat and late groups teach too slowly."""


class GspoOptions(ClipOptions):
    """GSPO clips tightly: the geometric mean of token ratios stays near 1."""

    clip_low: float = Field(default=3e-4, gt=0, le=1)
    """As in ClipOptions."""

    clip_high: float = Field(default=4e-4, gt=0)
    """As in ClipOptions."""


class GmpoOptions(Options):
    """GMPO clips each token's log ratio, widely, before the geometric mean."""

    log_clip: float = Field(default=0.4, gt=0)
    """Nats; ratios within e^-this and e^this are whole."""


class ToprOptions(Options):
    """TOPR has one choice."""

    is_length_normalised: bool = False
    """Whether ratio and likelihood are per token. As published, whole completions: long ones that the
    learner finds less likely than the sampler did then count for almost nothing when bad."""


class VespoOptions(Options):
    """Powers k and rates lambda of W^k exp(lambda (1 - W))."""

    power_good: float = Field(default=2.0, gt=0)
    """k where the advantage is >= 0. Higher takes more from unlikely completions."""

    rate_good: float = Field(default=3.0, gt=0)
    """lambda where the advantage is >= 0. Higher takes more from likely completions."""

    power_bad: float = Field(default=3.0, gt=0)
    """k where the advantage is below 0."""

    rate_bad: float = Field(default=2.0, gt=0)
    """lambda where the advantage is below 0."""


class DapoOptions(ClipOptions):
    """DAPO: clip higher, drop what teaches nothing, take from what is too long."""

    clip_high: float = Field(default=0.28, gt=0)
    """As in ClipOptions."""

    overlong_buffer_share: float = Field(default=0.2, ge=0, le=1)
    """Last part of the token limit over which up to 1 is taken from the reward; 0: nothing."""

    drops_uninformative: bool = True
    """Whether groups of equal rewards are left out of the divisor too (dynamic sampling)."""


class CispoOptions(ClipOptions):
    """CISPO bounds the weight and drops no token; as published, above only."""

    clip_low: float = Field(default=1.0, gt=0, le=1)
    """Weights are at least 1 - this."""

    clip_high: float = Field(default=4.0, gt=0)
    """Weights are at most 1 + this."""


class TruncatedOptions(ClipOptions):
    """TIS: GRPO against the proximal policy, times prox/q held below a ceiling."""

    ceiling: float = Field(default=2.0, gt=0)
    """Largest prox/q of a token that counts as it is."""


class MaskedOptions(ClipOptions):
    """MIS: likewise, times prox/q within a band and 0 outside. Tokens outside stay in the divisor."""

    least: float = Field(default=0.5, ge=0)
    """Lower end of the band."""

    most: float = Field(default=2.0, gt=0)
    """Upper end of the band."""

    veto: float = Field(default=0.0, ge=0)
    """A completion with a token whose prox/q is below this counts nothing; slime: 1e-4. 0: never."""


class SequenceMaskedOptions(MaskedOptions):
    """Likewise, by the ratio of a whole completion, which weighs all of its tokens."""

    least: float = Field(default=0.0, ge=0)
    """Lower end of the band."""

    most: float = Field(default=3.0, gt=0)
    """Upper end of the band."""


class GeometricMaskedOptions(MaskedOptions):
    """Likewise, by the geometric mean of the tokens' ratios."""

    least: float = Field(default=0.0, ge=0)
    """Lower end of the band. Against an engine's rounding, not staleness, 0.9999 is published."""

    most: float = Field(default=5.0, gt=0)
    """Upper end of the band. Against an engine's rounding, not staleness, 1.0001 is published."""


class IcePopOptions(MaskedOptions):
    """IcePop: likewise, within a wider band."""

    most: float = Field(default=5.0, gt=0)
    """Upper end of the band."""


class DecoupledOptions(ClipOptions):
    """Decoupled PPO."""

    proximal: Literal["recomputed", "log_linear"] = "recomputed"
    """The policy that the step is clipped to: the learner at the start of the batch, or the version
    before it as interpolated between p and q."""

    behaviour_cap: float = Field(default=math.inf, gt=0)
    """Largest prox/q of a token that counts; AReaL's code had 5 for long. inf: the published formula."""

    beyond_cap: Literal["mask", "truncate"] = "mask"
    """Whether tokens beyond the cap count nothing, or as much as the cap."""


class TotalVariationOptions(Options):
    """DPPO with total variation."""

    limit: float = Field(default=0.2, gt=0, lt=1)
    """How far p may be from q, in probability, the way a token is pushed."""

    penalty: float = Field(default=1e-3, ge=0)
    """Weight of log^2 ratio in the loss."""


class SecondMomentOptions(Options):
    """M2PO."""

    limit: float = Field(default=0.04, gt=0)
    """Of the mean of log^2 ratio over the tokens that stay."""


class DelightOptions(Options):
    """DG."""

    temperature: float = Field(default=1.0, gt=0)
    """eta; higher gates less."""


class HardDelightOptions(Options):
    """DG with a gate that is 0 or 1."""

    price: float = Field(default=0.0, ge=0)
    """Delight above which a token counts. 0: all better than their group; higher: rare successes only."""


class KondoOptions(Options):
    """DG's ranking: the same share of tokens in every batch."""

    share: float = Field(default=0.03, gt=0, le=1)
    """Of the batch's tokens that count, those of most delight. 1, as published: REINFORCE; 0.03 is ours."""


class SapoOptions(Options):
    """SAPO: how fast the gate closes on both sides of a ratio of 1."""

    rate_good: float = Field(default=1.0, gt=0)
    """tau where the advantage is above 0."""

    rate_bad: float = Field(default=1.05, gt=0)
    """tau elsewhere; larger than rate_good, because pushing down moves mass to tokens nobody asked for."""


class SequenceMaskOptions(ClipOptions):
    """OPSM: GRPO, divided by the deviation as there, without the bad completions that were left behind."""

    limit_nats: float = Field(default=0.5, gt=0)
    """Mean of log q/p over a completion's tokens beyond which a bad one counts nothing. DeepSeek publishes
    no value; slime's 1e-4 is meant for an engine's rounding, TRL's example is 0.5."""


class MirrorDescentOptions(Options):
    """OPMD."""

    temperature: float = Field(default=1.0, gt=0)
    """tau: of the soft baseline, and of the regularisation, which divides the loss by 1 + tau."""

    baseline: Literal["mean", "soft"] = "mean"
    """The group's mean reward, or tau log mean exp(reward / tau), which lies above it."""


class VcpoOptions(Options):
    """VCPO's loss; its learning-rate factor is learner.scales_rate_by_sample_size."""

    ceiling: float = Field(default=8.0, gt=0)
    """Largest p/q of a completion that counts as it is; inf: all do. The baseline always sees them whole, and
    is the best one for a sum over tokens, not for this loss's mean; see README.md."""
