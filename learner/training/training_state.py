"""A policy in training: moved by steps and rollbacks, and told of once the history has them.

    restart   checkpoint c --entries c+1..h, each with its own settings--> version h
    step      batch --> parameters, moments --> entry in the journal --> told

Decides with ``step`` what a batch does to the parameters, and keeps them in step with ``journal.history``.
Blocking: call its methods from one thread. Nothing else writes the parameters; readers hold the optimizer off
through ``master_access``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from learner.config import LearnerConfig
from learner.intake.trained_slots import TrainedSlots
from learner.journal.checkpoint import CheckpointCopy, CheckpointStore
from learner.journal.checkpoint_index import CHECKPOINTS
from learner.journal.checkpoint_rules import CheckpointRules, Due
from learner.journal.entry_rows import Origin
from learner.journal.history import History
from learner.journal.progress import BestVersion, NewsEntry, Progress, StepEntry
from learner.journal.step_journal import StepJournal, read_journal
from learner.masters.master_access import MasterAccess
from learner.merging.handed_in import HandedIn
from learner.merging.outer_optimizer import Merged, MergeInputs
from learner.model.model import Policy, ScoringModel
from learner.operator_orders import RollbackOrder
from learner.step.step_inputs import next_step, switch_before
from learner.step.step_loss import StepLoss
from learner.step.train_step import StepOutcome
from learner.step.trainer import Trainer
from learner.step_log import RollbackLine, StepLine
from learner.step_numbers import StepNumbers
from learner.step_settings import StepSettings
from learner.training.completion import TrainingError, completion_of
from learner.training.random_state import RandomState
from learner.training.replay import replay, settings_of
from learner.training.step_taken import StepTaken, entry_of, merged_outcome, observed_of, trained_of
from node.system.clock import Clock
from node.values.evaluation import EvaluationNotice
from node.values.groups.rollout import RolloutGroup
from node.values.policy import PolicyVersion
from node.values.run import StepRecord
from node.wire.rollouts import source_of


class TrainingState:
    """A policy in training, restored to where it stopped."""

    def __init__(
        self,
        config: LearnerConfig,
        policy: Policy,
        *,
        directory: Path,
        origin: Origin,
        clock: Clock,
        published: Callable[[], PolicyVersion | None],
        reference: ScoringModel | None = None,
    ) -> None:
        """Restore the newest checkpoint in ``directory``, and take the steps in the journal again.

        Args:
            published: returns the newest version in the learner's own store. Any thread.
            reference: the base model, for the penalty towards it; None: no such penalty.
        Raises:
            StartupError: the objective cannot be loaded; checkpoint or journal cannot be used.
            OSError: the directory cannot be made or read.
        """
        self.policy = policy
        self.config = config
        self._recorded_settings = settings_of(config)
        StepLoss.of(config)
        self._clock = clock
        self._published = published
        self._masters_wait_s = 0.0
        self.merged = Merged()
        self.master_access = MasterAccess(monotonic=clock.monotonic)
        """Closed to readers from the optimizer's step until ``hold`` names the version."""
        self.trainer = Trainer(
            policy, config, reference, before_writing=self._before_writing, merges=config.merge is not None
        )
        """Told what to do from here alone."""
        checkpoints = CheckpointStore(
            directory / CHECKPOINTS, origin=origin, keep_every_versions=config.keep_every_versions
        )
        start, place = checkpoints.restore(self.trainer.restore)
        plan = read_journal(directory, start, place, origin=origin, published=published())
        progress, self.restart = replay(
            self.trainer, plan, directory, progress=start, now=config, monotonic=clock.monotonic
        )
        self.history = History(
            progress,
            StepJournal(directory, origin=origin, place=plan.end, since=place),
            checkpoints,
            CheckpointRules.of(config),
            window=config.stop_window_versions,
            copied_version=start.version,
            monotonic=clock.monotonic,
        )
        self.master_access.begin(self.version)
        self._is_saved = True
        """Whether the parameters are those of ``version``."""

    @property
    def progress(self) -> Progress:
        """As the history has it."""
        return self.history.progress

    @property
    def version(self) -> int:
        """Version of the newest step in the journal; the parameters are one further while it is written."""
        return self.progress.version

    @property
    def best_version(self) -> int | None:
        """The best version as it is written down; None: not known yet."""
        return None if self.progress.best is None else self.progress.best.version

    @property
    def completion(self) -> str:
        """Why there is nothing left to do, in a few words; empty while there is."""
        return completion_of(self.progress, self.config)

    @property
    def trained_slots(self) -> TrainedSlots:
        """Slots trained on, up to ``version``."""
        return TrainedSlots(self.progress.trained_slots)

    def take_step(
        self,
        batch: Sequence[RolloutGroup],
        *,
        unacknowledged: Sequence[StepRecord],
        groups_wait_s: float,
    ) -> StepTaken | None:
        """Train on ``batch``, if it teaches anything. ``save`` must follow, as often as it takes.

        Args:
            batch: admitted groups, each at most as new as ``version``.
            unacknowledged: step records the coordinator may not have.
            groups_wait_s: wait for groups since the step before, for the step's line.
        Returns:
            None if loss or gradient was not finite: nothing has changed.
        Raises:
            TrainingError: the step made parameters that are not finite; the journal does not have it.
        """
        started_s, self._masters_wait_s = self._clock.monotonic(), 0.0
        random_state = RandomState.on(self.policy.device)
        outcome = self.trainer.step(next_step(batch, StepSettings.of(self.config), self.progress))
        if not outcome.is_finite:
            return None
        if outcome.is_applied:
            self._check_finite("step", "learner.learning_rate")
        self._is_saved = not outcome.is_applied
        line = self._line(batch, outcome, started_s=started_s, groups_wait_s=groups_wait_s)
        observed = observed_of(batch, outcome.kl_nats_of_groups, version=self.version)
        if not outcome.is_applied:
            return StepTaken(line, NewsEntry(line.reward_mean, best=None), b"", (), observed)
        entry = self._entry(line, outcome.numbers, unacknowledged=unacknowledged)
        entry = replace(entry, cuda_state_bytes=len(random_state.cuda))
        return StepTaken(line, entry, random_state.to_bytes(), tuple(map(source_of, batch)), observed)

    def take_merge(
        self,
        handed_in: Sequence[HandedIn],
        groups: Mapping[str, RolloutGroup],
        *,
        unacknowledged: Sequence[StepRecord],
        groups_wait_s: float,
    ) -> StepTaken:
        """Merge contributions into the next version. ``save`` must follow, as often as it takes.

        Args:
            handed_in: with changes; sorted by contributor.
            groups: those of their steps, by id.
            unacknowledged: as for ``take_step``, and so is ``groups_wait_s``.
        Raises:
            TrainingError: the parameters are not finite; the journal does not have it.
            ValueError: a payload is broken; nothing has changed.
        """
        started_s, self._masters_wait_s = self._clock.monotonic(), 0.0
        assert self.config.merge is not None
        configured, rates = self.config.merge.of_merge, self.progress.outer_rates
        batch, outcome, observed = merged_outcome(
            handed_in, groups, version=self.version, settings=configured
        )
        inputs = MergeInputs(handed_in, rates.of(configured))
        self._recorded_settings = self._recorded_settings | {"merge": inputs.settings.model_dump()}
        self.merged = self.trainer.merge(inputs)
        self._check_finite("merge", "learner.merge.outer_rate")
        self._is_saved = False
        outcome = replace(outcome, numbers=replace(outcome.numbers, **self.merged.numbers))
        line = self._line(batch, outcome, started_s=started_s, groups_wait_s=groups_wait_s)
        entry = replace(
            self._entry(line, outcome.numbers, unacknowledged=unacknowledged),
            contributed=tuple(one.contributed for one in handed_in),
            outer_rates=rates.after(self.merged.norm, configured),
        )
        return StepTaken(line, entry, b"", tuple(one.journalled() for one in handed_in), observed)

    def save(self, taken: StepTaken, evaluated: EvaluationNotice) -> float:
        """Make a step durable, with the version that is the best by now; return the seconds that took.

        Where none was taken, only what is known of the newest version is written: its groups need no memory
        here, since consuming them again changes nothing.

        Raises:
            RefusedError: DISK, where the disk is full or failing; the step is taken, save it again.
        """
        started_s = self._clock.monotonic()
        entry = replace(taken.entry, best=self._best_after(taken.line.reward_mean, evaluated))
        self.history.append(entry, random_state=taken.random_state, groups=taken.groups)
        self._is_saved = True
        return self._clock.monotonic() - started_s

    def adopt(self, config: LearnerConfig) -> None:
        """Take the following steps with other settings.

        Raises:
            StartupError: the objective cannot be loaded.
        """
        StepLoss.of(config)
        self.config, self._recorded_settings = config, settings_of(config)

    def roll_back(
        self, order: RollbackOrder, masters: Path, *, unacknowledged: Sequence[StepRecord]
    ) -> CheckpointCopy:
        """Make the next version of an earlier one's weights; write what is returned, then ``rolled_back``.

        Until then the version stays what it was, and nobody may be told: a restart knows nothing of it. The
        optimizer begins anew, because its moments are of the steps that are undone.

        Args:
            masters: directory of the earlier version's.
            unacknowledged: step records the coordinator may not have.
        Raises:
            OSError, ValueError: the files cannot be read; the parameters are of no version any more.
        """
        started_s, self._is_saved = self._clock.monotonic(), False
        self.trainer.begin_anew(masters)
        line = RollbackLine(
            version=self.version + 1,
            at_s=self._clock.now(),
            step_s=self._clock.monotonic() - started_s,
            restored_version=order.version,
        )
        progress = self.progress.rolled_back(
            line, order.order, ordered_at_s=order.at_s, unacknowledged=tuple(unacknowledged)
        )
        return self.history.begin_rollback(progress, self.trainer.copy(), self.policy.ranks)

    def rolled_back(self, copied: CheckpointCopy) -> StepRecord:
        """Go on from a rollback that is on disk; return its record, to be told."""
        self.history.end_rollback(copied)
        self._is_saved = True
        return self.progress.unacknowledged[-1]

    def checkpoint_due(self) -> Due:
        """Return whether a checkpoint is due, of the newest step in the journal."""
        return self.history.checkpoint_due() if self._is_fit_for_a_checkpoint else Due.NOT

    @property
    def has_new_steps(self) -> bool:
        """Whether a checkpoint of the newest step can be made, and none was begun."""
        return self.history.has_new_steps and self._is_fit_for_a_checkpoint

    def copy(self) -> CheckpointCopy:
        """Copy everything that the next step changes, for ``history`` to write."""
        return self.history.copy(self.trainer.copy(), self.policy.ranks)

    @property
    def _is_fit_for_a_checkpoint(self) -> bool:
        """Whether the masters are of ``version``, and round to what is published under it, if anything is."""
        again = self.restart
        is_unlike = again.is_exact is False and self.version == again.published_version
        return self._is_saved and not is_unlike

    def _best_after(self, reward_mean: float, evaluated: EvaluationNotice) -> BestVersion | None:
        """Return the best version once a batch had this reward."""
        if evaluated.is_evaluated:
            return self.progress.best_told(evaluated)
        published = self._published()
        return self.progress.best_after(
            reward_mean,
            window=self.config.stop_window_versions,
            published=0 if published is None else published.number,
        )

    def _check_finite(self, what: str, key: str) -> None:
        if not self.trainer.is_finite():
            raise TrainingError(
                f"{what} {self.version + 1} made parameters that are not finite; version {self.version} "
                f"stays. Lower {key}, then start again"
            )

    def _before_writing(self) -> None:
        self._masters_wait_s += self.master_access.begin_writing()

    def _entry(
        self, line: StepLine, numbers: StepNumbers, *, unacknowledged: Sequence[StepRecord]
    ) -> StepEntry:
        switch = switch_before(self.progress, StepSettings.of(self.config)).observe(numbers.surprisal_nats)
        return entry_of(line, switch, settings=self._recorded_settings, unacknowledged=unacknowledged)

    def _line(
        self, batch: Sequence[RolloutGroup], outcome: StepOutcome, *, started_s: float, groups_wait_s: float
    ) -> StepLine:
        is_step = outcome.is_applied
        return StepLine(
            version=self.version + is_step,
            at_s=self._clock.now(),
            step_s=self._clock.monotonic() - started_s,
            numbers=outcome.numbers,
            groups=trained_of(batch, version=self.version),
            groups_wait_s=groups_wait_s,
            masters_wait_s=self._masters_wait_s,
            changed_settings=self.progress.changed_by(self._recorded_settings) if is_step else {},
        )
