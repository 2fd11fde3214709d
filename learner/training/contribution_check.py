"""Checks a contribution against the groups that the learner dealt, and its own masters. Blocking."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from learner.merging.formulas.fragments import Fragments
from learner.merging.handed_in import HandedIn, report_objection
from learner.merging.merge_settings import MergeSettings
from learner.merging.outer_optimizer import norm_of_change
from learner.step.step_loss import teaches_where_drawn
from learner.step_settings import StepSettings
from learner.training.training_state import TrainingState
from node.values.groups.rollout import RolloutGroup


@dataclass(frozen=True, slots=True)
class CheckedContribution:
    """A contribution to which there is no objection."""

    norm: float
    """Euclidean norm of its change; 0: there is none."""
    disputed: frozenset[str]
    """Groups that taught its contributor nothing, by its word, and would teach as far as the learner sees."""


def check_contribution(
    one: HandedIn,
    groups: Mapping[str, RolloutGroup],
    state: TrainingState,
    *,
    merge: MergeSettings,
    fragments: Fragments,
    batch_groups: int,
) -> CheckedContribution:
    """Measure a contribution's change, and look at the groups that it says taught nothing.

    Args:
        groups: all that it names, as they were dealt.
        batch_groups: of a step.
    Raises:
        ValueError: its report cannot be true, or its change is broken.
    """
    if why := report_objection(one, groups, version=state.version):
        raise ValueError(why)
    norm = 0.0
    if payload := one.contribution.payload:
        norm = norm_of_change(
            payload,
            merge,
            state.policy.parameters,
            due=fragments.due_names(one.contribution.base_version),
            words_before=state.trainer.words_before,
        )
    idle = [groups[told.group_id] for told in one.report.uninformative]
    step = StepSettings.of(state.config)
    disputed = {told.group_id for told in one.report.not_finite}
    for start in range(0, len(idle), batch_groups):
        disputed.update(_teaching(idle[start : start + batch_groups], step, version=state.version))
    return CheckedContribution(norm, frozenset(disputed))


def _teaching(batch: list[RolloutGroup], step: StepSettings, *, version: int) -> Iterator[str]:
    teaches = teaches_where_drawn(batch, version=version, settings=step)
    return (group.group_id for group, does in zip(batch, teaches, strict=True) if does)
