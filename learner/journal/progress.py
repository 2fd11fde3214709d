"""The state of training apart from the tensors, and how each entry of the journal moves it on; pure."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Final

from learner.intake.trained_slots import TrainedSlots
from learner.merging.contribution import Contributed
from learner.merging.outer_rates import OuterRates
from learner.objective.entropy_switch import EntropySwitch
from learner.step_log import RollbackLine, StepLine
from node.values.evaluation import EvaluationNotice
from node.values.run import StepRecord

CHANGES_KEPT: Final = 32
"""Newest changes of settings that are remembered; ``steps.jsonl`` has all of them."""

CONTRIBUTORS_KEPT: Final = 1024
"""Contributors whose newest contribution is remembered: more than take part in a run at once."""


@dataclass(frozen=True, slots=True)
class BestVersion:
    """The version that ``heterorl-node export --best`` exports."""

    version: int
    reward_mean: float | None = None
    """Mean training reward of the window at whose end it was published; None: best in evaluations."""

    def is_beaten_by(self, reward_mean: float) -> bool:
        """Whether a mean training reward is better; never than what was evaluated."""
        return self.reward_mean is not None and reward_mean > self.reward_mean


@dataclass(frozen=True, slots=True)
class Rollback:
    """An operator's order to go on from an earlier version, carried out."""

    order: str
    """Names the order, so that it is carried out once."""
    version: int
    """The version that it made."""
    restored_version: int
    """The version whose weights it has."""
    at_s: float
    """Unix seconds on the learner's clock."""
    ordered_at_s: float = 0.0
    """Unix seconds on the coordinator's clock; 0: not known."""


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting with which steps are computed differently from some step on."""

    version: int
    """The first version made with it."""
    key: str
    was: str
    """As JSON has it."""
    is_now: str
    at_s: float
    """Unix seconds on the learner's clock, when that version was made."""


@dataclass(frozen=True, slots=True)
class StepEntry:
    """A step in the journal, whose row also has torch's random state before it, and its groups."""

    line: StepLine
    acknowledged_version: int
    """Newest version whose record the coordinator had acknowledged by then."""
    best: BestVersion | None
    entropy_switch: EntropySwitch
    """After the step."""
    settings: dict[str, object]
    """Configuration that the step was computed with, by key, and versions of the code."""
    cuda_state_bytes: int = 0
    """How many at the end of the random state are the CUDA device's; 0: the step was not taken on one."""
    contributed: tuple[Contributed, ...] = ()
    """Contributions that the step merged, whose rows are beside the entry; none: a step on groups."""
    outer_rates: OuterRates = field(default_factory=OuterRates)
    """After the merge."""

    @property
    def version(self) -> int:
        """The version that the step made."""
        return self.line.version

    @property
    def record(self) -> StepRecord:
        """The step as the coordinator is told of it."""
        groups = self.line.groups
        return StepRecord(
            self.version,
            tuple(group.group_id for group in groups),
            tuple(group.staleness_versions for group in groups),
        )


@dataclass(frozen=True, slots=True)
class NewsEntry:
    """An entry for anything else worth remembering; the version stays."""

    reward_mean: float | None
    """Mean reward of a batch that taught nothing; None if there was none."""
    best: BestVersion | None


Entry = StepEntry | NewsEntry


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of training apart from the tensors."""

    version: int
    step: StepLine | RollbackLine | None = None
    """The step or rollback that made this version."""
    unacknowledged: tuple[StepRecord, ...] = ()
    """Step records the coordinator may not have, this version's included."""
    trained_slots: tuple[tuple[int, int], ...] = ()
    """All slots ever trained on; see ``learner.intake.trained_slots``."""
    recent_rewards: tuple[float, ...] = ()
    """Mean reward of the newest batches, oldest first; at most ``stop_window_versions``."""
    best: BestVersion | None = None
    """None: not known yet."""
    entropy_switch: EntropySwitch = field(default_factory=EntropySwitch)
    """Whether SFPO's fast steps are still taken."""
    rollback: Rollback | None = None
    """The newest one; None: there was none."""
    settings: dict[str, object] = field(default_factory=dict)
    """Settings of the newest step, as ``StepEntry`` has them; empty: not known."""
    changes: tuple[SettingChange, ...] = ()
    """Changes of settings, the newest last; at most ``CHANGES_KEPT``."""
    contributed: tuple[Contributed, ...] = ()
    """The newest contribution of each contributor that was merged; at most ``CONTRIBUTORS_KEPT``."""
    outer_rates: OuterRates = field(default_factory=OuterRates)
    """Rates of the next merge."""

    @property
    def oldest_usable_version(self) -> int:
        """The version from which on samplers' policies descend from this one: older groups are refused."""
        return 0 if self.rollback is None else self.rollback.version

    def window_mean(self, *more: float, window: int) -> float | None:
        """Return the mean reward of the newest ``window`` batches, with ``more``; None: there are fewer."""
        rewards = (*self.recent_rewards, *more)[-window:]
        return fmean(rewards) if len(rewards) == window else None

    def best_told(self, evaluated: EvaluationNotice) -> BestVersion | None:
        """Return the best version that was told; where none has a score, the one that is known."""
        return self.best if evaluated.best is None else BestVersion(evaluated.best)

    def best_after(self, reward_mean: float, *, window: int, published: int) -> BestVersion | None:
        """Return the best version where nothing is evaluated, once a batch had this reward.

        Args:
            published: the newest version, which is the best where the batch's window is.
        """
        mean = self.window_mean(reward_mean, window=window)
        if mean is None or (self.best is not None and not self.best.is_beaten_by(mean)):
            return self.best
        return BestVersion(published, mean)

    def changed_by(self, settings: Mapping[str, object]) -> dict[str, tuple[str, str]]:
        """Return the settings that differ from the newest step's: what each was and is, as JSON has it."""
        texts = ((key, _text(was), _text(is_now)) for key, was, is_now in _both(self.settings, settings))
        return {key: (was, is_now) for key, was, is_now in texts if was != is_now}

    def rolled_back(
        self,
        line: RollbackLine,
        order: str,
        *,
        ordered_at_s: float = 0.0,
        unacknowledged: tuple[StepRecord, ...],
    ) -> "Progress":
        """Return the progress once a rollback, which ``line`` tells of, is durable.

        What was learned of the versions that were left is dropped: rewards of the window, SFPO's switch.

        Args:
            unacknowledged: step records the coordinator may not have.
        """
        version = line.version
        return replace(
            self,
            version=version,
            step=line,
            unacknowledged=(*unacknowledged, StepRecord(version, (), (), line.restored_version)),
            recent_rewards=(),
            entropy_switch=EntropySwitch(),
            outer_rates=self.outer_rates.rolled_back(),
            rollback=Rollback(order, version, line.restored_version, line.at_s, ordered_at_s),
        )

    def after(self, entry: Entry, *, window: int) -> "Progress":
        """Return the progress once ``entry`` is in the journal.

        Args:
            window: the number of newest rewards to keep.
        Raises:
            ValueError: the entry is of a step that does not follow.
        """
        if isinstance(entry, NewsEntry):
            known = self.recent_rewards
            rewards = known if entry.reward_mean is None else (*known, entry.reward_mean)
            return replace(self, recent_rewards=rewards[-window:], best=entry.best)
        if entry.version != self.version + 1:
            raise ValueError(f"step {entry.version} does not follow version {self.version}")
        records = (*self.unacknowledged, entry.record)
        made_at_s = entry.line.at_s
        changes = (
            SettingChange(entry.version, key, was, is_now, made_at_s)
            for key, (was, is_now) in entry.line.changed_settings.items()
        )
        return replace(
            self,
            version=entry.version,
            step=entry.line,
            unacknowledged=tuple(one for one in records if one.version > entry.acknowledged_version),
            trained_slots=TrainedSlots(self.trained_slots).with_groups(entry.record.group_ids).runs,
            recent_rewards=(*self.recent_rewards, entry.line.reward_mean)[-window:],
            best=entry.best,
            entropy_switch=entry.entropy_switch,
            settings=entry.settings,
            changes=(*self.changes, *changes)[-CHANGES_KEPT:],
            contributed=_newest(self.contributed, entry),
            outer_rates=entry.outer_rates,
        )


def _newest(known: tuple[Contributed, ...], entry: StepEntry) -> tuple[Contributed, ...]:
    now = {one.contributor: replace(one, version=entry.version) for one in entry.contributed}
    others = [one for one in known if one.contributor not in now]
    return (*others, *now.values())[-CONTRIBUTORS_KEPT:]


def _both(
    was: Mapping[str, object], is_now: Mapping[str, object], *, table: str = ""
) -> Iterator[tuple[str, object, object]]:
    """Yield the keys that both have, with both values; those of a table, if both have the same in it."""
    for key in sorted(was.keys() & is_now.keys()):
        one, other = was[key], is_now[key]
        if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
            yield from _both(one, other, table=f"{table}{key}.")
        else:
            yield table + key, one, other


def _text(value: object) -> str:
    return json.dumps(value, default=str)
