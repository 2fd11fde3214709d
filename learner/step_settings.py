"""The settings of a gradient step: the one value of configuration, `set`, journal and ranks.

A new setting is a field here, with its bounds, what moving it does, and ``Live`` if `heterorl-node set` may
change it in a run; and the place that uses it. The configuration has it as a key of [learner], the journal's
entry of each step keeps it, a step that is taken again has it as it was, and every rank is told of it. Its
default leaves steps as they were, and never changes: entries written before it was there mean the default.
"""

import math
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from learner.objective.menu import check_name, check_options
from learner.objective.options import StalenessDiscount
from node.config.setting_table import LIVE

Packing = Literal["none", "prefixes"]

_Kind = TypeVar("_Kind")

Live = Annotated[_Kind, LIVE]
"""Type of a field that may change while the learner runs: a step takes it, and keeps nothing of it."""


class StepSettings(BaseModel):
    """Everything that a step depends on besides parameters, moments and groups."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    learning_rate: Live[float] = Field(gt=0, le=1)
    """Peak step size of AdamW. Published runs on 1-8 B models use 1e-6."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Rate after the warm-up: the peak rate, or a decline over ``decay_steps`` to ``final_lr_share`` of it,
    where it stays. A function of the version alone: a restart goes on exactly."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate rises linearly to its peak. AdamW's moments are noise in the first ones."""

    decay_steps: int = Field(default=0, ge=0)
    """Steps of the decline, counted from the end of the warm-up; required by linear and cosine."""

    final_lr_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the peak rate after the decline. At 0, steps go on and change nothing."""

    weight_decay: Live[float] = Field(default=0.0, ge=0, le=1)
    """Decoupled decay of AdamW. Above 0, weights also shrink in steps that hardly teach anything; on a batch
    that teaches nothing no step is taken."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Memory of AdamW's two moments, each in [0, 1). Longer memory mixes more old policies in."""

    objective: Annotated[str, AfterValidator(check_name)] = "drift_aware"
    """Name of the objective, or the import path of your own, ``package.module:function``."""

    objective_options: dict[str, Any] = {}
    """Options of the objective, a table [learner.objective_options]; see learner/objective/options.py. For
    the clipped ones, smaller clip_low and clip_high are slower and steadier."""

    gradient_clip_norm: Live[float] = Field(default=1.0, gt=0)
    """Largest norm of a gradient; larger gradients are scaled down to it."""

    kl_coefficient: Live[float] = Field(default=0.005, ge=0)
    """Weight of KL(behaviour || learner) in the loss; 0 leaves it out. Higher ties the learner to
    the policies that sampled, which steadies late groups and slows learning. The gradient of a token stops
    growing at p/q = 2."""

    reference_kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of KL(learner || base model) in the loss; 0 leaves it out. Higher keeps what the base model can
    do, and limits what is learned. Costs a second copy of the model on ``device`` (four bytes a parameter;
    with bfloat16 two, but for embeddings) and a third more work a step. No token pulls harder than 6 times
    this."""

    staleness_discount: StalenessDiscount = "exponential"
    """How old groups lose weight: by half-life (exponential), by (1 + age) ** -power (polynomial), by their
    effective sample size (sample_size), or not at all (none)."""

    staleness_half_life_versions: Live[float] = Field(default=math.inf, gt=0)
    """With ``exponential``: a group this many versions old counts half. Infinity: all count in full."""

    staleness_power: float = Field(default=0.5, ge=0)
    """With ``polynomial``: 0.5 makes a group 3 versions old count half, one 15 versions old a quarter."""

    scales_rate_by_sample_size: bool = False
    """Multiply the learning rate of each step by sqrt(ESS / completions) of the completions' weights, as VCPO
    does: small steps where few completions carry the weight. With completions of thousands of tokens a single
    one carries it, and the factor is 1 / sqrt(completions)."""

    fast_steps: int = Field(default=0, ge=0, le=16)
    """Extra steps on each batch before the reposition and the actual step (SFPO; published: 3). Each costs as
    much as a step; together they need a copy of parameters and optimizer."""

    reposition_share: float = Field(default=0.8, ge=0, le=1)
    """Share of the fast steps' way that is kept."""

    fast_steps_until_deviations: float = Field(default=math.inf, gt=0)
    """Stop taking fast steps for good once the policy's entropy is this many standard deviations above its
    mean over the last 30 steps (SFPO; published: 1). Lower ends them earlier; infinity never does."""

    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Tokens that the model reads in one forward and backward pass: distinct ones where rows are packed, else
    padding included. Bounds memory, changes no result; a completion longer than this passes alone."""

    packing: Packing = "none"
    """As in LearnerConfig, where it is ``prefixes`` unless set: steps of older entries were not packed."""

    @classmethod
    def of(cls, settings: "StepSettings") -> Self:
        """Return those among more settings, as the configuration has them."""
        return cls.model_validate({name: getattr(settings, name) for name in cls.model_fields})

    @classmethod
    def live_keys(cls) -> tuple[str, ...]:
        """Return the fields that may change while the learner runs."""
        return tuple(name for name, field in cls.model_fields.items() if LIVE in field.metadata)

    @field_validator("objective_options")
    @classmethod
    def _options_are_the_objectives(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "objective" in info.data:
            check_options(info.data["objective"], options)
        return options

    @model_validator(mode="after")
    def _schedule_has_its_decay(self) -> Self:
        if (self.lr_schedule == "constant") == (self.decay_steps > 0):
            rule = "has no decline, so decay_steps must be" if self.decay_steps else "needs decay_steps above"
            raise ValueError(f"lr_schedule {self.lr_schedule!r} {rule} 0; decay_steps is {self.decay_steps}")
        return self

    @model_validator(mode="after")
    def _betas_are_memories(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}, each must be in [0, 1)")
        return self
