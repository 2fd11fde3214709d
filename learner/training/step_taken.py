"""A step, or a merge, as it was taken: everything that must be durable before anybody is told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from learner.intake.divergence_panel import Observed
from learner.journal.progress import Entry, StepEntry
from learner.merging.contribution import LocalStep
from learner.merging.handed_in import HandedIn
from learner.objective.entropy_switch import EntropySwitch
from learner.step.step_inputs import token_ages
from learner.step.train_step import StepOutcome
from learner.step_log import StepLine, TrainedGroup
from learner.step_numbers import BatchFigures, StepNumbers
from node.values.groups.rollout import EncodedGroup, RolloutGroup
from node.values.run import StepRecord

_COUNTS: Final = frozenset({"teaching_groups", "tokens", "clamped_tokens", "read_tokens", "distinct_tokens"})


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
    steps = [step for one in handed_in for step in one.report.steps]
    batch = [groups[group.group_id] for step in steps for group in step.groups]
    return batch, StepOutcome(
        is_finite=True,
        loss=0.0,
        kl_nats_of_groups=tuple(kl_nats for step in steps for kl_nats in step.kl_nats_of_groups),
        numbers=_merged_numbers(steps, BatchFigures.of(batch, version=version)),
    )


def _merged_numbers(steps: Sequence[LocalStep], batch: BatchFigures) -> StepNumbers:
    """Return the numbers of several steps as those of one: sums of counts, means over tokens of the rest.

    Args:
        steps: at least one, which trained on a token.
        batch: of all their groups.
    """
    told = [step.numbers for step in steps]
    tokens = sum(one.tokens for one in told)

    def merged(name: str) -> Any:
        values = [getattr(one, name) for one in told]
        if None in values:
            return None
        if name in _COUNTS:
            return sum(values)
        return sum(value * one.tokens for value, one in zip(values, told, strict=True)) / tokens

    names = [one.name for one in fields(StepNumbers) if one.name != "batch"]
    return StepNumbers(batch=batch, **{name: merged(name) for name in names})
