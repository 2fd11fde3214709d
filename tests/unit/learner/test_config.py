import math

import pytest
from pydantic import ValidationError

from learner.config import LearnerConfig


def test_only_what_has_no_safe_default_must_be_given() -> None:
    config = LearnerConfig.model_validate({"model_dir": "m", "learning_rate": 1e-6})
    assert config.objective == "drift_aware"
    assert config.staleness_half_life_versions == math.inf


@pytest.mark.parametrize(
    "broken",
    [
        {"learning_rate": 0},
        {"learning_rate": math.nan},
        {"betas": [0.9, 1.0]},
        {"objective": "gepp"},
        {"objective_options": {"clip_low": 1.5}},
        {"objective": "gspo", "objective_options": {"threshold_nats": 0.1}},
        {"staleness_discount": "linear"},
        {"fast_steps": -1},
        {"device": "tpu"},
        {"pp": 0},
        {"rematerialise": True},
        {"offload": True, "tp": 2},
        {"staleness_half_life_versions": 0},
        {"a_key_nobody_knows": 1},
    ],
)
def test_a_value_outside_its_bounds_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LearnerConfig.model_validate({"model_dir": "m", "learning_rate": 1e-6, **broken})
