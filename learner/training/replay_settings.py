"""The settings of a step as the journal keeps them, and what a replay makes of them; pure."""

from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

import torch
from pydantic import ValidationError

from learner.config import LearnerConfig
from learner.step_settings import StepSettings
from learner.training.step_loss import StepLoss
from node.errors import StartupError

_OF_PROCESS: Final = ("device", "compute_dtype", "rematerialise", "threads")
"""They hold for as long as the process lives: a replay has those of now."""


def settings_of(config: LearnerConfig) -> dict[str, object]:
    """Return what a step depends on besides parameters and groups, as JSON can hold it."""
    code = {"torch": str(torch.__version__), "heterorl-node": version("heterorl-node")}
    of_process = {key: getattr(config, key) for key in _OF_PROCESS}
    return StepSettings.of(config).model_dump() | of_process | code


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """The settings of a step that is taken again."""

    step: StepSettings
    changed: tuple[str, ...]
    """Settings that are not what they were, in words."""

    @classmethod
    def of(cls, entry: dict[str, object], now: LearnerConfig, *, has_reference: bool) -> "ReplaySettings":
        """Take everything from the journal that does not hold for the whole process.

        Args:
            has_reference: whether the base model is loaded, for the penalty towards it.
        """
        today = settings_of(now)
        changed = [
            f"{key} was {entry.get(key)}, is {today[key]}"
            for key in (*_OF_PROCESS, "torch", "heterorl-node")
            if entry.get(key) != today[key]
        ]
        step = StepSettings.of(now)
        taken = {key: entry[key] for key in StepSettings.model_fields if key in entry}
        try:
            step = StepSettings.model_validate(step.model_dump() | taken)
        except ValidationError as error:  # of a version that had other settings
            changed.append(f"the settings of then are not valid now: {error}")
        if step.reference_kl_coefficient and not has_reference:
            changed.append(f"reference_kl_coefficient was {step.reference_kl_coefficient:g}, is 0")
            step = step.model_copy(update={"reference_kl_coefficient": 0.0})
        try:
            StepLoss.of(step)
        except StartupError as error:  # code of the run's own that is gone
            changed.append(f"objective was {step.objective}, is {now.objective}: {error}")
            of_now = {"objective": now.objective, "objective_options": now.objective_options}
            step = step.model_copy(update=of_now)
        return cls(step, tuple(changed))
