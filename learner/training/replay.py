"""Steps taken again from the journal, each with its own settings and random state.

checkpoint c --entries c+1..h--> version h, whose words are compared with the published ones
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch
from pydantic import ValidationError

from learner.config import LearnerConfig
from learner.journal.progress import Progress, StepEntry
from learner.journal.restart import JournalRecord, RestartPlan
from learner.journal.step_journal import groups_of
from learner.masters.master_words import root_of
from learner.merging.handed_in import HandedIn
from learner.merging.merge_settings import MergeSettings
from learner.merging.outer_optimizer import MergeInputs
from learner.model.model import Policy
from learner.step.step_inputs import next_step
from learner.step.step_loss import StepLoss
from learner.step.trainer import Trainer
from learner.step_settings import StepSettings
from learner.training.random_state import RandomState
from node.errors import StartupError
from node.values.groups.rollout import EncodedGroup
from node.values.policy import PolicyVersion
from node.wire.rollouts import group_from_wire

_OF_PROCESS: Final = ("device", "compute_dtype", "rematerialise", "threads")
"""They hold for as long as the process lives: a replay has those of now."""


def settings_of(config: LearnerConfig) -> dict[str, object]:
    """Return what a step depends on besides parameters and groups, as JSON can hold it."""
    code = {"torch": str(torch.__version__), "heterorl-node": version("heterorl-node")}
    of_process = {key: getattr(config, key) for key in _OF_PROCESS}
    merged = {} if config.merge is None else {"merge": config.merge.of_merge.model_dump()}
    return StepSettings.of(config).model_dump() | merged | of_process | code


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
            # Newer software's settings were at their defaults when the step was taken.
            step = StepSettings.model_validate(taken)
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


@dataclass(frozen=True, slots=True)
class Restart:
    """How the learner got to the version at which it stopped."""

    checkpoint_version: int
    version: int
    took_s: float
    is_exact: bool | None
    """Whether the published words came out again; None: none were published since the checkpoint."""
    published_version: int | None
    """The version whose words were compared."""
    changed: tuple[str, ...]
    """Settings that differ from those of the steps that were taken again, in words."""

    @property
    def replayed_steps(self) -> int:
        """Steps that were taken again."""
        return self.version - self.checkpoint_version

    @property
    def outcome(self) -> str:
        """In a word: exact, inexact or unpublished."""
        return {None: "unpublished", True: "exact", False: "inexact"}[self.is_exact]


def replay(
    trainer: Trainer,
    plan: RestartPlan,
    directory: Path,
    *,
    progress: Progress,
    now: LearnerConfig,
    monotonic: Callable[[], float],
) -> tuple[Progress, Restart]:
    """Take the steps since the checkpoint again; return the progress after them, and how that went.

    Args:
        directory: the learner's state, whose journal has the groups.
        progress: the checkpoint's.
    Raises:
        StartupError: as ``take_again``, or the groups of a step cannot be read.
    """
    started_s, start = monotonic(), progress.version
    is_exact = _is_published(trainer.policy, progress, plan.compare)
    changed: dict[str, None] = {}
    for record in plan.records:
        is_step = isinstance(record.entry, StepEntry)
        if is_step:
            again = take_again(trainer, record, groups_of(directory, record), progress=progress, now=now)
            changed |= dict.fromkeys(again)
        progress = progress.after(record.entry, window=now.stop_window_versions)
        if is_step and is_exact is None:
            is_exact = _is_published(trainer.policy, progress, plan.compare)
    return progress, Restart(
        start,
        progress.version,
        took_s=monotonic() - started_s,
        is_exact=is_exact,
        published_version=None if plan.compare is None else plan.compare.number,
        changed=tuple(changed),
    )


def _is_published(policy: Policy, progress: Progress, version: PolicyVersion | None) -> bool | None:
    """Whether the masters are the words of a published version; None: they are of another number."""
    if version is None or version.number != progress.version:
        return None
    return root_of(policy.master_words) == version.root


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
    if trainer.merges != ("merge" in entry.settings):
        was, does = ("was", "does not") if "merge" in entry.settings else ("was not", "does")
        raise StartupError(
            f"step {entry.version} of the journal {was} merged, and this learner {does} merge",
            fix="Start the learner once more with [learner.merge] as it was and stop it (SIGTERM): it writes "
            "a checkpoint then. Then start it with the other configuration.",
        )
    if trainer.merges:
        return _merge_again(trainer, entry, groups)
    settings = ReplaySettings.of(entry.settings, now, has_reference=trainer.reference is not None)
    device = trainer.policy.device
    random_state = RandomState.on(device)
    then = RandomState.from_bytes(record.row.random_state, cuda_bytes=entry.cuda_state_bytes)
    batch = [group_from_wire(group).without_abstained() for group in groups]
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


def _merge_again(trainer: Trainer, entry: StepEntry, rows: Sequence[EncodedGroup]) -> tuple[str, ...]:
    """Merge contributions from the journal again: sums of decoded numbers, the same on every machine."""
    try:
        settings = MergeSettings.model_validate(entry.settings["merge"])
        trainer.merge(MergeInputs([HandedIn.of_journal(row) for row in rows], settings))
    except ValueError as error:
        raise StartupError(
            f"the merge of version {entry.version} in the journal cannot be made again: {error}",
            fix="Start the learner with the version of heterorl-node that the journal was written with.",
        ) from error
    return ()
