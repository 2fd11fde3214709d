"""Settings of a plain GEPO step, with any one thing changed."""

from typing import Any

from learner.config import LearnerConfig
from learner.step_settings import StepSettings


def make_step_settings(**changes: Any) -> StepSettings:
    plain = StepSettings(
        learning_rate=1e-3,
        objective="gepo",
        kl_coefficient=0.0,
        micro_batch_tokens=1 << 20,
        packing=LearnerConfig.model_fields["packing"].default,
    )
    return changed(plain, **changes)


def changed(settings: StepSettings, **changes: Any) -> StepSettings:
    return StepSettings.model_validate(settings.model_dump() | changes)
