"""A step that is taken again has its own settings, and what cannot be is said."""

import json
from pathlib import Path
from typing import Any

import pytest

from learner.config import LearnerConfig
from learner.step_settings import StepSettings
from learner.training.replay import ReplaySettings, settings_of


def config(**changes: Any) -> LearnerConfig:
    return LearnerConfig(model_dir=Path("model"), **{"learning_rate": 1e-3, **changes})


def replayed(then: LearnerConfig, now: LearnerConfig, **changes: object) -> ReplaySettings:
    entry = json.loads(json.dumps({**settings_of(then), **changes}))
    return ReplaySettings.of(entry, now, has_reference=False)


def test_a_step_has_the_settings_it_was_taken_with() -> None:
    then = config(
        objective="grpo", objective_options={"clip_low": 0.1}, betas=(0.5, 0.9), warmup_steps=3, fast_steps=2
    )
    again = replayed(then, config(learning_rate=1e-5))
    assert again.changed == ()
    assert again.step == StepSettings.of(then)


def test_a_setting_that_an_entry_is_older_than_is_at_its_default() -> None:
    entry = settings_of(config())
    del entry["betas"]
    again = ReplaySettings.of(entry, config(betas=(0.5, 0.9)), has_reference=False)
    assert (again.step.betas, again.changed) == (StepSettings.model_fields["betas"].default, ())


def test_a_step_from_before_there_were_packs_is_taken_again_row_by_row() -> None:
    entry = settings_of(config())
    assert entry.pop("packing") == "prefixes"
    assert ReplaySettings.of(entry, config(), has_reference=False).step.packing == "none"


@pytest.mark.parametrize(
    ("then", "entry", "said"),
    [
        ({"device": "cuda"}, {}, "device was cuda, is cpu"),
        ({}, {"torch": "1.0"}, "torch was 1.0, is"),
        ({"reference_kl_coefficient": 0.5}, {}, "reference_kl_coefficient was 0.5, is 0"),
        (
            {},
            {"objective": "no_such_module:objective"},
            "objective was no_such_module:objective, is drift_aware",
        ),
        ({}, {"kl_coefficient": -1}, "the settings of then are not valid now"),
    ],
)
def test_what_cannot_be_as_it_was_is_said(then: dict[str, Any], entry: dict[str, object], said: str) -> None:
    again = replayed(config(**then), config(), **entry)
    [changed] = again.changed
    assert changed.startswith(said)
    assert again.step.reference_kl_coefficient == 0
