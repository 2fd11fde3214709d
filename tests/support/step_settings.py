"""Settings of a plain GEPO step, with any one thing changed."""

import math
from dataclasses import replace
from typing import Any

from learner.objective.registry import load_objective
from learner.training.rate_schedule import RateSchedule
from learner.training.train_step import StepSettings


def make_step_settings(**changes: Any) -> StepSettings:
    settings = StepSettings(
        objective=load_objective("gepo"),
        schedule=RateSchedule(),
        kl_coefficient=0.0,
        reference_kl_coefficient=0.0,
        gradient_clip_norm=1.0,
        staleness_discount="exponential",
        staleness_half_life_versions=math.inf,
        staleness_power=0.5,
        scales_rate_by_sample_size=False,
        fast_steps=0,
        reposition_share=0.8,
        fast_steps_until_deviations=math.inf,
        micro_batch_tokens=1 << 20,
    )
    return replace(settings, **changes)
