"""What can be set about the learner ([learner] in the configuration file)."""

import math
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator


class LearnerConfig(BaseModel):
    """Settings of the learner. Batch size and staleness bound belong to the run: see [coordinator]."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model_dir: Path
    """Directory of a causal language model (safetensors, tokenizer.json): version 0 of the run.
    Read once; every sampler needs the same weights, layout and tokenizer."""

    learning_rate: float = Field(gt=0, le=1)
    """Step size of AdamW, constant. Published runs on 1-8 B models use 1e-6."""

    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Decoupled decay of AdamW. Above 0 the weights shrink also on groups that teach nothing."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Memory of AdamW's two moments, each in [0, 1). Longer memory mixes more old policies in."""

    clip_epsilon: float = Field(default=0.2, gt=0, lt=1)
    """Weights beyond 1 +- this push no further. Smaller is slower and steadier."""

    gradient_clip_norm: float = Field(default=1.0, gt=0)
    """Longest gradient that is applied as it is; longer ones are scaled down to it."""

    kl_coefficient: float = Field(default=0.005, ge=0)
    """Weight of KL(behaviour || learner) in the loss; 0 leaves it out. Higher ties the learner to
    the policies that sampled, which steadies late groups and slows learning."""

    staleness_half_life_versions: float = Field(default=math.inf, gt=0)
    """A group this many versions old counts half. Infinity counts every group in full."""

    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Tokens, padding included, of one forward and backward pass. Bounds memory, changes no result;
    a completion longer than this passes alone."""

    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """Where the model is trained."""

    threads: int = Field(default=0, ge=0)
    """CPU threads for tensor work; 0 leaves the choice to torch."""

    buffer_groups: int = Field(default=64, ge=1)
    """Groups held in memory at most. Less than one batch would never fill a batch."""

    keyframe_every_versions: int = Field(default=64, ge=1)
    """Distance between artifacts that start from nothing. Shorter lets a late sampler in with fewer
    bytes; longer uploads less."""

    max_versions: int = Field(default=0, ge=0)
    """Version after which the learner publishes, drains and ends the daemon; 0 never."""

    @model_validator(mode="after")
    def _betas_are_memories(self) -> "LearnerConfig":
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}, each must be in [0, 1)")
        return self
