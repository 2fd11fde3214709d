"""The settings of a step as the journal keeps them, and what a replay makes of them; pure."""

from dataclasses import dataclass, fields
from importlib.metadata import version
from typing import Final

import torch
from pydantic import ValidationError

from learner.config import LearnerConfig
from learner.training.train_step import StepSettings
from node.errors import StartupError

_OPTIMIZER: Final = ("learning_rate", "betas", "weight_decay")
_SCHEDULE: Final = ("lr_schedule", "warmup_steps", "decay_steps", "final_lr_share")
_OBJECTIVE: Final = ("objective", "objective_options")
_STEP: Final = tuple(
    field.name for field in fields(StepSettings) if field.name not in ("objective", "schedule")
)
_OF_PROCESS: Final = ("device", "compute_dtype", "rematerialise", "threads")
"""They hold for as long as the process lives: a replay has those of now."""


def settings_of(config: LearnerConfig) -> dict[str, object]:
    """Return what a step depends on besides parameters and groups, as JSON can hold it."""
    keys = (*_OPTIMIZER, *_SCHEDULE, *_OBJECTIVE, *_STEP, *_OF_PROCESS)
    code = {"torch": str(torch.__version__), "heterorl-node": version("heterorl-node")}
    return {key: getattr(config, key) for key in keys} | code


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """The settings of a step that is taken again."""

    config: LearnerConfig
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
        taken = {key: entry[key] for key in (*_OPTIMIZER, *_SCHEDULE, *_OBJECTIVE, *_STEP) if key in entry}
        try:
            config = LearnerConfig.model_validate({**now.model_dump(), **taken})
        except ValidationError as error:  # of a version that had other settings
            changed.append(f"the settings of then are not valid now: {error}")
            config = now
        if config.reference_kl_coefficient and not has_reference:
            changed.append(f"reference_kl_coefficient was {config.reference_kl_coefficient:g}, is 0")
            config = config.model_copy(update={"reference_kl_coefficient": 0.0})
        try:
            step = StepSettings.of(config)
        except StartupError as error:  # code of the run's own that is gone
            changed.append(f"objective was {config.objective}, is {now.objective}: {error}")
            of_now = {key: getattr(now, key) for key in _OBJECTIVE}
            step = StepSettings.of(config.model_copy(update=of_now))
        return cls(config, step, tuple(changed))
