"""A step, or a merge, as it was taken: everything that must be durable before anybody is told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from learner.intake.divergence_panel import Observed
from learner.journal.progress import Entry, StepEntry
from learner.merging.handed_in import HandedIn, all_steps, merged_numbers
from learner.objective.entropy_switch import EntropySwitch
from learner.step.step_inputs import token_ages
from learner.step.train_step import StepOutcome
from learner.step_log import StepLine, TrainedGroup
from learner.step_numbers import BatchFigures
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
    batch: Sequence[RolloutGroup], kl_nats: Sequence[float], *, version: int
) -> tuple[Observed, ...]:
    """Return the divergence of each group of a batch from ``version``, given that of its tokens."""
    return tuple(
        Observed(one.sampler_id, nats, token_ages(one, version=version))
        for one, nats in zip(batch, kl_nats, strict=True)
    )


def trained_of(batch: Sequence[RolloutGroup], *, version: int) -> tuple[TrainedGroup, ...]:
    """Return the groups of a batch that the policy of ``version`` is trained on, for the step's line."""
    return tuple(TrainedGroup(one.group_id, one.sampler_id, version - one.oldest_version) for one in batch)


def merged_outcome(
    handed_in: Sequence[HandedIn], groups: Mapping[str, RolloutGroup], *, version: int
) -> tuple[list[RolloutGroup], StepOutcome]:
    """Return the groups of contributions' steps, and these steps as one.

    Args:
        groups: all of them, by id.
        version: of the learner before the merge.
    """
    steps = list(all_steps(handed_in))
    batch = [groups[group.group_id] for step in steps for group in step.groups]
    return batch, StepOutcome(
        is_finite=True,
        loss=0.0,
        kl_nats_of_groups=tuple(kl_nats for step in steps for kl_nats in step.kl_nats_of_groups),
        numbers=merged_numbers(steps, BatchFigures.of(batch, version=version)),
    )
