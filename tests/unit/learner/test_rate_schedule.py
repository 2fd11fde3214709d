from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from learner.config import LearnerConfig
from learner.model.model import load_policy
from learner.step.optimizer import rate_share
from learner.step.train_step import train_step
from support.groups import make_group
from support.step_settings import make_step_settings
from support.tiny_model import make_tiny_model


def shares(versions: int, **schedule: Any) -> list[float]:
    settings = make_step_settings(**schedule)
    return [rate_share(settings, version) for version in range(versions)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({}, [1, 1]),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
        (
            {"lr_schedule": "linear", "warmup_steps": 2, "decay_steps": 4, "final_lr_share": 0.2},
            [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2],
        ),
        (
            {"lr_schedule": "cosine", "decay_steps": 4, "final_lr_share": 0.2},
            [1, 0.6 + 0.4 * 0.5**0.5, 0.6, 0.6 - 0.4 * 0.5**0.5, 0.2, 0.2],
        ),
    ],
)
def test_the_rate_rises_by_equal_steps_declines_to_its_final_share_and_stays(
    schedule: dict[str, Any], expected: list[float]
) -> None:
    assert shares(len(expected), **schedule) == pytest.approx(expected)


def test_a_step_is_taken_at_its_versions_rate_and_leaves_the_optimizers_as_it_was(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, hidden=16, layers=1)
    settings = make_step_settings(lr_schedule="linear", decay_steps=4)
    moved = []
    for version in (0, 3, 4):
        policy = load_policy(model_dir, device="cpu")
        before = {name: tensor.detach().clone() for name, tensor in policy.parameters.items()}
        optimizer = torch.optim.AdamW(policy.parameters.values(), lr=1e-2, weight_decay=0)
        outcome = train_step(
            policy, optimizer, [make_group(version=version)], version=version, settings=settings
        )
        assert outcome.numbers.learning_rate == pytest.approx(1e-2 * (1 - version / 4))
        assert optimizer.param_groups[0]["lr"] == 1e-2
        moved.append(max(float((t.detach() - before[n]).abs().max()) for n, t in policy.parameters.items()))
    # The first step of AdamW moves a parameter by the rate.
    assert moved == pytest.approx([1e-2, 2.5e-3, 0.0], rel=1e-3, abs=1e-9)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"lr_schedule": "linear"}, "'linear' needs decay_steps above 0"),
        ({"decay_steps": 5}, "'constant' has no decline, so decay_steps must be 0"),
        ({"lr_schedule": "cosine", "decay_steps": 5, "final_lr_share": 1.5}, "final_lr_share"),
    ],
)
def test_a_schedule_that_cannot_be_meant_is_refused(broken: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        LearnerConfig.model_validate({"model_dir": "m", "learning_rate": 1e-6, **broken})
