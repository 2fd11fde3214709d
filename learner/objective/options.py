"""What can be set about each objective; free of torch, so that a wrong value is answered at once.

Numbers given here are the published ones.
"""

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    """No options; what the others have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ClipOptions(Options):
    """A clipped surrogate."""

    clip_low: float = Field(default=0.2, gt=0, le=1)
    """A bad completion or token is pushed down until its weight is below 1 - this."""

    clip_high: float = Field(default=0.2, gt=0)
    """A good one is pushed up until its weight is above 1 + this."""


class GspoOptions(ClipOptions):
    """GSPO clips tightly: the geometric mean of token ratios stays near 1."""

    clip_low: float = Field(default=3e-4, gt=0, le=1)
    """As in ClipOptions."""

    clip_high: float = Field(default=4e-4, gt=0)
    """As in ClipOptions."""
