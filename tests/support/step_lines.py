"""Lines of steps that were not taken, with any number changed."""

from dataclasses import fields
from typing import Any

from learner.step_log import StepLine, TrainedGroup
from learner.step_numbers import BatchFigures, StepNumbers

_OF_BATCH = {field.name for field in fields(BatchFigures)}
_OF_STEP = {field.name for field in fields(StepNumbers)}


def make_batch_figures(**changes: Any) -> BatchFigures:
    return BatchFigures(
        **{
            "reward_mean": 0.5,
            "reward_deviation": 0.5,
            "zero_advantage_ratio": 0.5,
            "completion_tokens_mean": 5.0,
            "completion_tokens_p95": 10.5,
            "completion_tokens_max": 11,
            "prompt_tokens_mean": 3.0,
            "cut_ratio": 0.25,
            "staleness_mean_versions": 1.5,
            "staleness_max_versions": 2,
            "grader_metrics": {},
            **changes,
        }
    )


def make_step_line(version: int, *, groups: tuple[TrainedGroup, ...] = (), **changes: Any) -> StepLine:
    """Return the line of a step; ``changes`` are of the line, or of its numbers."""
    of_batch = {name: changes.pop(name) for name in _OF_BATCH & changes.keys()}
    of_step = {name: changes.pop(name) for name in _OF_STEP & changes.keys()}
    numbers: dict[str, Any] = {
        "batch": make_batch_figures(**of_batch),
        "teaching_groups": 1,
        "tokens": 12,
        "gradient_norm": 3.0,
        "learning_rate": 1e-3,
        "kl_nats": 0.25,
        "reference_kl_nats": None,
        "surprisal_nats": 0.75,
        "ess_ratio": 0.75,
        "clip_fraction": 0.125,
        "truncated_fraction": None,
        "clamped_tokens": 0,
        **of_step,
    }
    line: dict[str, Any] = {"at_s": 1000.0, "step_s": 0.5, **changes}
    return StepLine(version=version, numbers=StepNumbers(**numbers), groups=groups, **line)
