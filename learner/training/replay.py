"""Steps taken again from the journal, each with its own settings and random state."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from learner.config import LearnerConfig
from learner.journal.progress import Progress, StepEntry
from learner.journal.restart import JournalRecord
from learner.objective.entropy_switch import EntropySwitch
from learner.step_settings import StepSettings
from learner.training.orders import StepOrder
from learner.training.random_state import RandomState
from learner.training.step_loss import StepLoss
from learner.training.trainer import Trainer
from node.errors import StartupError
from node.rollout import EncodedGroup, RolloutGroup
from node.wire.rollouts import group_from_wire

_OF_PROCESS: Final = ("device", "compute_dtype", "rematerialise", "threads")
"""They hold for as long as the process lives: a replay has those of now."""


def settings_of(config: LearnerConfig) -> dict[str, object]:
    """Return what a step depends on besides parameters and groups, as JSON can hold it."""
    code = {"torch": str(torch.__version__), "heterorl-node": version("heterorl-node")}
    of_process = {key: getattr(config, key) for key in _OF_PROCESS}
    return StepSettings.of(config).model_dump() | of_process | code


def next_step(
    groups: Sequence[RolloutGroup],
    settings: StepSettings,
    progress: Progress,
) -> StepOrder:
    """Return the step to take from where ``progress`` is, without SFPO's fast steps once they are over."""
    fast_steps = settings.fast_steps * switch_before(progress, settings).is_on
    return StepOrder(
        groups,
        version=progress.version,
        settings=settings.model_copy(update={"fast_steps": fast_steps}),
    )


def switch_before(progress: Progress, settings: StepSettings) -> EntropySwitch:
    """Return SFPO's switch as a step with these settings finds it."""
    return replace(progress.entropy_switch, threshold=settings.fast_steps_until_deviations)


def versions_of_tokens(group: RolloutGroup) -> NDArray[np.int64]:
    """Return the version that drew each drawn token of a group."""
    versions = [completion.of_drawn(completion.policy_version) for completion in group.completions]
    return np.concatenate(versions).astype(np.int64)


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


def take_again(
    trainer: Trainer,
    record: JournalRecord,
    groups: Sequence[EncodedGroup],
    *,
    progress: Progress,
    now: LearnerConfig,
) -> tuple[str, ...]:
    """Take a step from the journal; return which of its settings are not what they were, in words.

    Raises:
        StartupError: it is not finite or teaches nothing now, or torch does not take its random state.
    """
    entry = record.entry
    assert isinstance(entry, StepEntry)
    settings = ReplaySettings.of(entry.settings, now, has_reference=trainer.reference is not None)
    device = trainer.policy.device
    random_state = RandomState.on(device)
    then = RandomState.from_bytes(record.row.random_state, cuda_bytes=entry.cuda_state_bytes)
    batch = [group_from_wire(group) for group in groups]
    try:
        then.restore(device)
        outcome = trainer.step(next_step(batch, settings.step, progress))
    finally:
        random_state.restore(device)
    if not outcome.is_applied or not trainer.is_finite():
        raise StartupError(
            f"step {entry.version} of the journal cannot be taken again: it is not finite or teaches "
            f"nothing now. Settings that differ: {'; '.join(settings.changed) or 'none'}",
            fix="Start the learner with the device and the versions that the journal was written with.",
        )
    return settings.changed
