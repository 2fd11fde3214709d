"""Options of what a run asks a judge, and a peer's key for whom it asks."""

import re
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from node.tasks.task_options import checked_pattern
from sampler.graders.judge.judge_endpoint import JudgeEndpoint

JUDGE_FIELD: Final = re.compile(r"\{(question|answer|completion)\}")


class JudgeOptions(BaseModel):
    """Question to a model about each completion; each sampler's configuration says where that model is."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: str = Field(min_length=1, max_length=200)
    """Its name. Samplers have it in ``sampler.judge.models``, or refuse the run."""
    template: str = Field(min_length=1)
    """The question: {question}, {answer} and {completion} stand for the prompt, the right answer and what
    the policy wrote, which is put between two lines that the policy cannot know."""
    system: str = ""
    """Its system prompt; a warning against instructions in the completion is appended."""
    score_pattern: str | None = Field(default=None, max_length=500)
    """Regular expression whose first group is the score; its last match counts. A group that is part of a
    number stands for all of it: ``Score: ([0-9]+)`` reads 7.5 of ``Score: 7.5``."""
    score_key: str | None = Field(default=None, min_length=1, max_length=100)
    """Key of the score in the JSON object that the judge answers with, instead of ``score_pattern``."""
    lowest: float = 0.0
    """The score that is worth reward 0."""
    highest: float = 10.0
    """The score that is worth reward 1. An answer beyond the scale is no answer."""
    max_tokens: int = Field(default=512, ge=1, le=8192)
    """Limit of the judge's answer, which is drawn at temperature 0."""

    @field_validator("template")
    @classmethod
    def _has_the_completion(cls, template: str) -> str:
        if "{completion}" not in template:
            raise ValueError("must have {completion}, and may have {question} and {answer}")
        return template

    @field_validator("score_pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str | None) -> str | None:
        return checked_pattern(pattern, "the score, such as Score: ([0-9.]+)")

    @model_validator(mode="after")
    def _has_a_scale(self) -> Self:
        if (self.score_pattern is None) is (self.score_key is None):
            raise ValueError("set either score_pattern or score_key")
        if not self.lowest < self.highest:
            raise ValueError(f"lowest = {self.lowest} must be below highest = {self.highest}")
        return self


class JudgeSettings(BaseModel):
    """Keys of a peer that may ask a judge."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    judge: JudgeEndpoint | None = None
    """A model that grades, for runs whose grader is ``judge``; unset: this sampler refuses such runs."""
