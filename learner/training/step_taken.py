"""A step, or a merge, as it was taken: everything that must be durable before anybody is told."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from learner.intake.divergence_panel import Observed
from learner.journal.progress import Entry, NewsEntry, StepEntry
from learner.merging.handed_in import HandedIn, merged_numbers
from learner.merging.merge_settings import MergeSettings
from learner.objective.entropy_switch import EntropySwitch
from learner.step.step_inputs import token_ages
from learner.step.train_step import StepOutcome
from learner.step_log import StepLine, TrainedGroup
from learner.step_numbers import BatchFigures, StepNumbers
from node.values.groups.rollout import EncodedGroup, RolloutGroup
from node.values.run import StepRecord


@dataclass(frozen=True, slots=True)
class StepTaken:
    """The result of a batch. Nobody is told of a step before its entry is durable."""

    line: StepLine
    entry: Entry
    """For the journal, with torch's random state before the step, and the groups. ``save`` adds the best
    version."""
    random_state: bytes
    groups: tuple[EncodedGroup, ...]
    observed: tuple[Observed, ...]
    """Divergence of each group's behaviour policy from the version before the step."""

    @property
    def record(self) -> StepRecord | None:
        """None: the batch taught nothing, so no step was taken, and the version stays."""
        return self.entry.record if isinstance(self.entry, StepEntry) else None


def entry_of(
    line: StepLine,
    switch: EntropySwitch,
    *,
    settings: dict[str, object],
    unacknowledged: Sequence[StepRecord],
) -> StepEntry:
    """Return the journal's entry of a step: without best version and random state, which follow.

    Args:
        switch: after the step.
        settings: the step was computed with these.
        unacknowledged: step records the coordinator may not have.
    """
    return StepEntry(
        line=line,
        acknowledged_version=min((one.version for one in unacknowledged), default=line.version) - 1,
        best=None,
        entropy_switch=switch,
        settings=settings,
    )


def observed_of(
    batch: Sequence[RolloutGroup], kl_nats: Sequence[float], *, version: float
) -> tuple[Observed, ...]:
    """Return the divergence of each group of a batch from ``version``, given that of its tokens."""
    return tuple(
        Observed(one.sampler_id, nats, token_ages(one, version=version))
        for one, nats in zip(batch, kl_nats, strict=True)
    )


def taught_nothing(batch: Sequence[RolloutGroup], *, version: int, at_s: float) -> StepTaken:
    """Return what is to be told of groups that taught a contributor nothing.

    Args:
        version: of the learner, which stays.
        at_s: Unix seconds.
    """
    numbers = StepNumbers(
        batch=BatchFigures.of(batch, version=version),
        teaching_groups=0,
        tokens=sum(one.drawn_tokens for group in batch for one in group.completions),
        gradient_norm=0.0,
        learning_rate=0.0,
        kl_nats=math.nan,
        surprisal_nats=math.nan,
        reference_kl_nats=None,
        ess_ratio=math.nan,
        clip_fraction=0.0,
        truncated_fraction=None,
        clamped_tokens=0,
    )
    groups = trained_of(batch, version=version)
    line = StepLine(version=version, at_s=at_s, step_s=0.0, numbers=numbers, groups=groups)
    return StepTaken(line, NewsEntry(line.reward_mean, best=None), b"", (), ())


def trained_of(batch: Sequence[RolloutGroup], *, version: int) -> tuple[TrainedGroup, ...]:
    """Return the groups of a batch that the policy of ``version`` is trained on, for the step's line."""
    return tuple(TrainedGroup(one.group_id, one.sampler_id, version - one.oldest_version) for one in batch)


def merged_outcome(
    handed_in: Sequence[HandedIn],
    groups: Mapping[str, RolloutGroup],
    *,
    version: int,
    settings: MergeSettings,
) -> tuple[list[RolloutGroup], StepOutcome, tuple[Observed, ...]]:
    """Return the groups of contributions' steps, these steps as one, and the divergences that they report.

    A contributor that has taken s of H steps is s / H of a version further, and one that keeps steps which
    travel (eager) is further by all of them: groups are so much older to it.

    Args:
        groups: all of them, by id.
        version: of the learner before the merge.
        settings: by which the steps were taken.
    """
    batch: list[RolloutGroup] = []
    observed: list[Observed] = []
    for one in handed_in:
        begins = one.contribution.base_version + (settings.overlap == "eager")
        for number, step in enumerate(one.report.steps):
            trained = [groups[group.group_id] for group in step.groups]
            at = begins + number / settings.local_steps
            found = observed_of(trained, step.kl_nats_of_groups, version=at)
            observed += (replace(each, said_by=one.contributor) for each in found)
            batch += trained
    steps = [step for one in handed_in for step in one.report.steps]
    numbers = merged_numbers(steps, BatchFigures.of(batch, version=version))
    kl_nats = tuple(one.kl_nats for one in observed)
    outcome = StepOutcome(is_finite=True, loss=0.0, kl_nats_of_groups=kl_nats, numbers=numbers)
    return batch, outcome, tuple(observed)
