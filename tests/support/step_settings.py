"""Settings of a plain GEPO step, with any one thing changed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from learner.config import LearnerConfig
from learner.training.train_step import StepSettings


def make_step_settings(**changes: Any) -> StepSettings:
    config = LearnerConfig(
        model_dir=Path(), learning_rate=1e-3, objective="gepo", kl_coefficient=0.0, micro_batch_tokens=1 << 20
    )
    return replace(StepSettings.of(config), **changes)
