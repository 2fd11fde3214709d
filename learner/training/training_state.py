"""Parameters, optimizer, progress and checkpoint, which move together.

Blocking: call its methods from one thread. Nothing else writes the parameters; readers hold the optimizer off
through ``master_access``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray

from learner.config import LearnerConfig
from learner.intake.divergence_panel import Observed
from learner.intake.trained_slots import TrainedSlots
from learner.step_log import BatchFigures, StepLine, TrainedGroup
from learner.training.checkpoint import BestVersion, CheckpointStore, Progress
from learner.training.master_access import MasterAccess
from learner.training.model import Policy, ScoringModel
from learner.training.train_step import StepOutcome, StepSettings, train_step
from node.clock import Clock
from node.errors import HeteroRLError
from node.rollout import DeliveredGroup, RolloutGroup, mean_metrics
from node.run import EvaluationNotice, StepRecord, StepReport

ExpectedDivergence = Callable[[str, NDArray[np.int64]], NDArray[np.float64]]
"""Takes a sampler's id and the ages of some of its tokens, see ``DivergencePanel.expected``."""

Evaluations = Callable[[], EvaluationNotice]
"""Called in any thread."""


class TrainingError(HeteroRLError):
    """Training cannot go on. The last good version stays checkpointed and published."""


@dataclass(frozen=True, slots=True)
class StepTaken:
    """The result of a batch. Nobody is told of a step before its checkpoint is durable."""

    record: StepRecord | None
    """None: the batch taught nothing, so no step was taken, and the version stays."""
    line: StepLine
    progress: Progress
    """Content of the checkpoint beside the tensors."""
    observed: tuple[Observed, ...]
    """Divergence of each group's behaviour policy from the version before the step."""


class TrainingState:
    """A policy in training, restored to its newest checkpoint."""

    def __init__(
        self,
        config: LearnerConfig,
        policy: Policy,
        *,
        directory: Path,
        clock: Clock,
        reference: ScoringModel | None = None,
    ) -> None:
        """Restore the newest checkpoint in ``directory`` for the objective and optimizer configured.

        Args:
            reference: the base model, for the penalty towards it; None: no such penalty.
        Raises:
            StartupError: the objective cannot be loaded, or the newest checkpoint cannot be used.
            OSError: the directory cannot be made.
        """
        self.policy = policy
        self._config = config
        self._settings = StepSettings.of(config)
        self._optimizer = torch.optim.AdamW(
            policy.parameters.values(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._checkpoints = CheckpointStore(directory, keep_every_versions=config.keep_every_versions)
        self._reference = reference
        self._clock = clock
        self.progress = self._checkpoints.restore(policy, self._optimizer)
        """The newest checkpoint's progress."""
        self._best = self.progress.best
        """As known now; the next checkpoint has it."""
        self.master_access = MasterAccess(version=self.version, monotonic=clock.monotonic)
        """Closed to readers from the optimizer's step until ``hold`` names the version."""
        self._masters_wait_s = 0.0
        self._optimizer.register_step_pre_hook(self._before_writing)

    @property
    def version(self) -> int:
        """Version of the newest checkpoint; the parameters are one step further while it is being written."""
        return self.progress.version

    @property
    def best_version(self) -> int | None:
        """The best version as it is written down; None: not known yet."""
        return None if self.progress.best is None else self.progress.best.version

    @property
    def completion(self) -> str:
        """Why there is nothing left to do, in a few words; empty while there is."""
        limit, goal = self._config.max_versions, self._config.stop_at_reward
        if 0 < limit <= self.version:
            return f"done: version {self.version} of {limit}"
        reward = self._window_mean(self.progress.recent_rewards)
        if goal is not None and reward is not None and reward >= goal:
            window = self._config.stop_window_versions
            return f"done: mean reward {reward:.4g} over {window} batches, the goal is {goal:g}"
        return ""

    @property
    def trained_slots(self) -> TrainedSlots:
        """Slots trained on, up to ``version``."""
        return TrainedSlots(self.progress.trained_slots)

    def take_step(
        self,
        batch: Sequence[DeliveredGroup],
        *,
        unacknowledged: Sequence[StepRecord],
        expected_divergence: ExpectedDivergence,
        evaluations: Evaluations,
    ) -> StepTaken | None:
        """Train on ``batch``, if it teaches anything. ``save`` must follow, as often as it takes.

        Args:
            batch: admitted groups, each at most as new as ``version``.
            unacknowledged: step records the coordinator may not have; they go into the checkpoint.
            evaluations: asked once the step is taken.
        Returns:
            None if loss or gradient was not finite: nothing has changed.
        Raises:
            TrainingError: the step made parameters that are not finite; no checkpoint has them.
        """
        started_s, self._masters_wait_s = self._clock.monotonic(), 0.0
        threshold = self._settings.fast_steps_until_deviations
        switch = replace(self.progress.entropy_switch, threshold=threshold)
        outcome = train_step(
            self.policy,
            self._optimizer,
            [one.group for one in batch],
            version=self.version,
            settings=replace(self._settings, fast_steps=self._settings.fast_steps * switch.is_on),
            expected_kl_nats=[
                expected_divergence(one.sampler_id, self.version - _versions_of_tokens(one.group))
                for one in batch
            ],
            reference=self._reference,
        )
        if not outcome.is_finite:
            return None
        if outcome.is_applied and not self.policy.is_finite():
            raise TrainingError(
                f"step {self.version + 1} made parameters that are not finite; version {self.version} stays. "
                "Lower learner.learning_rate, then start again"
            )
        line = self._line(batch, outcome, step_s=self._clock.monotonic() - started_s)
        progress, record = self._progress_after(line, evaluations()), None
        if outcome.is_applied:
            group_ids, staleness = zip(
                *((g.group_id, g.staleness_versions) for g in line.groups), strict=True
            )
            record = StepRecord(line.report.version, group_ids, staleness)
            progress = replace(
                progress,
                version=record.version,
                step=line,
                unacknowledged=(*unacknowledged, record),
                trained_slots=self.trained_slots.with_groups(record.group_ids).runs,
                entropy_switch=switch.observe(outcome.surprisal_nats),
            )
        observed = tuple(
            Observed(one.sampler_id, kl_nats, token_ages(one.group, version=self.version))
            for one, kl_nats in zip(batch, outcome.kl_nats_of_groups, strict=True)
        )
        return StepTaken(record, line, progress=progress, observed=observed)

    def _progress_after(self, line: StepLine, evaluated: EvaluationNotice) -> Progress:
        """Return the progress with a batch's reward and the news of evaluations; the version is as before."""
        rewards = (*self.progress.recent_rewards, line.report.reward_mean)
        rewards = rewards[-self._config.stop_window_versions :]
        self._best = self._best_of(line.report.version, rewards, evaluated)
        return replace(
            self.progress,
            recent_rewards=rewards,
            best=self._best,
            evaluating_version=evaluated.under_way,
            announced_version=evaluated.announced,
        )

    def save(self, taken: StepTaken) -> float:
        """Make a step durable; return the seconds that took.

        Where none was taken, only what is known of the newest version is written: its groups need no memory
        here, since consuming them again changes nothing.

        Raises:
            OSError: the disk is full or failing; the step is taken all the same, save it again.
        """
        started_s = self._clock.monotonic()
        progress = replace(taken.progress, best=self._best)  # heard of since, maybe
        if taken.record is not None:
            self._checkpoints.save(self.policy, self._optimizer, progress)
        elif self.version:
            self._checkpoints.amend(progress)
        self.progress = progress
        return self._clock.monotonic() - started_s

    def keep_best(self, evaluated: EvaluationNotice) -> None:
        """Make durable which version is the best, if evaluations have ended since the last step.

        Raises:
            OSError: the disk is full or failing; nothing has changed.
        """
        if not self.has_news_of_best(evaluated):
            return
        self._best = _evaluated_best(evaluated)
        progress = replace(self.progress, best=self._best)
        if self.version:  # the base model has no checkpoint
            self._checkpoints.amend(progress)
        self.progress = progress

    def has_news_of_best(self, evaluated: EvaluationNotice) -> bool:
        """Whether evaluations say that another version is the best than is written down."""
        return evaluated.is_evaluated and self.progress.best != _evaluated_best(evaluated)

    def _best_of(
        self, version: int, rewards: tuple[float, ...], evaluated: EvaluationNotice
    ) -> BestVersion | None:
        if evaluated.is_evaluated:
            return _evaluated_best(evaluated)
        known, mean = self.progress.best, self._window_mean(rewards)
        if mean is None or (known is not None and not known.is_beaten_by(mean)):
            return known
        return BestVersion(version, mean)

    def _window_mean(self, rewards: tuple[float, ...]) -> float | None:
        window = rewards[-self._config.stop_window_versions :]
        return fmean(window) if len(window) == self._config.stop_window_versions else None

    def _before_writing(self, *_: object) -> None:
        self._masters_wait_s += self.master_access.begin_writing()

    def _line(self, batch: Sequence[DeliveredGroup], outcome: StepOutcome, *, step_s: float) -> StepLine:
        groups = tuple(
            TrainedGroup(one.group.group_id, one.sampler_id, self.version - one.group.oldest_version)
            for one in batch
        )
        report = StepReport(
            version=self.version + outcome.is_applied,
            reward_mean=fmean(c.reward for one in batch for c in one.group.completions),
            staleness_mean_versions=fmean(group.staleness_versions for group in groups),
            staleness_max_versions=max(group.staleness_versions for group in groups),
            kl_nats=outcome.kl_nats,
            ess_ratio=outcome.ess_ratio,
            clip_fraction=outcome.clip_fraction,
            gradient_norm=outcome.gradient_norm,
            step_s=step_s,
            surprisal_nats=outcome.surprisal_nats,
            grader_metrics=mean_metrics(one.group.metric_means for one in batch),
        )
        return StepLine(
            at_s=self._clock.now(),
            report=report,
            tokens=outcome.tokens,
            groups=groups,
            clamped_tokens=outcome.clamped_tokens,
            truncated_fraction=outcome.truncated_fraction,
            trust_mean=outcome.trust_mean,
            learning_rate=outcome.learning_rate,
            reference_kl_nats=outcome.reference_kl_nats,
            figures=BatchFigures.of([one.group for one in batch]),
            teaching_groups=outcome.teaching_groups,
            masters_wait_s=self._masters_wait_s,
        )


def _evaluated_best(evaluated: EvaluationNotice) -> BestVersion | None:
    return None if evaluated.best is None else BestVersion(evaluated.best)


def token_ages(group: RolloutGroup, *, version: int) -> tuple[tuple[int, float], ...]:
    """Return each staleness that drawn tokens of a group have at ``version``, and their share.

    A completion that was sampled while versions were swapped has tokens of several.
    """
    drawn_from = _versions_of_tokens(group)
    numbers, tokens = np.unique(drawn_from, return_counts=True)
    return tuple(
        (version - number, count / drawn_from.size)
        for number, count in zip(numbers.tolist(), tokens.tolist(), strict=True)
    )


def _versions_of_tokens(group: RolloutGroup) -> NDArray[np.int64]:
    versions = [completion.of_drawn(completion.policy_version) for completion in group.completions]
    return np.concatenate(versions).astype(np.int64)
