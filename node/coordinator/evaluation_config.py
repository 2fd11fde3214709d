"""Settings of evaluation: which held-out prompts a version is asked, and how."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from node.coordinator.work.terms.run_terms import NO_EVALUATION, EvaluationSettings
from node.values import limits
from node.values.evaluation import REWARD
from node.values.groups.sampling_parameters import SamplingParameters

Value = TypeVar("Value")


class EvaluationConfig(BaseModel):
    """Table ``[coordinator.evaluation]``: held-out prompts that a version is asked now and then."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    every_versions: int = Field(ge=0, le=1 << 40)
    """Evaluate the base model and then the newest version whenever so many more are out; 0: never. An
    evaluation that lasts longer than that is finished first. Rarer costs less sampling."""
    prompts: int = Field(ge=1, le=4096)
    """How many prompts: the first of ``data.evaluation_rows`` or, without data, the task's last ones, which
    are then never trained on. Each costs a group, or two where no verifier checks the answers. A version of
    which less than 90 % are answered has no score. Four times as many halve the error. After a change in
    mid-run earlier scores are not compared with later ones; without data it reorders the training prompts
    that follow."""
    completions: int = Field(default=1, ge=1, le=limits.GROUP_COMPLETIONS)
    """Per prompt. More make the score steadier where sampling is random."""
    temperature: float = Field(default=0.0, ge=0, le=limits.LARGEST_TEMPERATURE)
    """Softmax temperature, at least 0.01; 0 takes the most likely token each time."""
    max_new_tokens: int | None = Field(default=None, ge=1, le=1 << 20)
    """Length at which a completion is cut; unset: the run's."""
    best_by: str = Field(default=REWARD, pattern=f"^{limits.METRIC_NAME_PATTERN}$")
    """The metric that picks the best version: "reward", or one that the grader returns, such as one that a
    hacked reward does not move. An evaluation without that metric is never the best; `heterorl-node status`
    says so."""

    @model_validator(mode="after")
    def _is_coherent(self) -> Self:
        if self.completions > 1 and self.temperature == 0:
            raise ValueError(
                f"completions = {self.completions} at temperature = 0 are the same completion every time; "
                "set completions = 1 or raise temperature"
            )
        if 0 < self.temperature < limits.LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature = {self.temperature:g} must be 0 or at least {limits.LEAST_TEMPERATURE:g}"
            )
        return self

    def settings(
        self,
        sampling: SamplingParameters,
        *,
        has_rows: bool,
        task: str,
        task_options: Mapping[str, JsonValue],
    ) -> EvaluationSettings:
        """Return how versions are evaluated in a run that trains by ``sampling``.

        The most likely token is what is left after top_k = 1.

        Args:
            has_rows: Whether the coordinator has the data; otherwise the task's last prompts are held out.
        """
        if not self.every_versions:
            return NO_EVALUATION
        is_greedy, canonical = self.temperature == 0, json.dumps(task_options, sort_keys=True)
        return copied(
            self,
            EvaluationSettings,
            sampling=replace(
                sampling,
                temperature=1.0 if is_greedy else self.temperature,
                top_k=1 if is_greedy else sampling.top_k,
                max_new_tokens=self.max_new_tokens or sampling.max_new_tokens,
            ),
            held_out_prompts=0 if has_rows else self.prompts,
            task=task,
            task_options=hashlib.sha256(canonical.encode()).hexdigest()[:16] if task_options else "",
        )


def copied(config: BaseModel, value_type: type[Value], **others: object) -> Value:
    """Return a value with the settings that have the names of its fields, and ``others``."""
    names = {field.name for field in fields(value_type)} - others.keys()  # type: ignore[arg-type]
    return value_type(**{name: getattr(config, name) for name in names if hasattr(config, name)}, **others)
