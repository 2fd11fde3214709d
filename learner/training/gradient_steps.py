"""Gradient steps with the settings of now, or, taken again, with those of the journal."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from learner.config import LearnerConfig
from learner.journal.progress import Progress, StepEntry
from learner.journal.records import JournalRecord
from learner.objective.entropy_switch import EntropySwitch
from learner.step_settings import StepSettings
from learner.training.model import Policy, ScoringModel
from learner.training.optimizer import adopt_settings, make_optimizer
from learner.training.random_state import RandomState
from learner.training.replay_settings import ReplaySettings
from learner.training.step_loss import StepLoss
from learner.training.train_step import StepOutcome, train_step
from node.errors import StartupError
from node.rollout import RolloutGroup
from node.wire.rollouts import group_from_wire


class GradientSteps:
    """A policy and its optimizer. Blocking."""

    def __init__(self, config: LearnerConfig, policy: Policy, reference: ScoringModel | None) -> None:
        """Begin with an optimizer that has taken no step.

        Args:
            reference: the base model, for the penalty towards it; None: no such penalty.
        Raises:
            StartupError: the objective cannot be loaded.
        """
        StepLoss.of(config)
        self._config = config
        self._policy = policy
        self._reference = reference
        self.optimizer = make_optimizer(policy, config)

    def adopt(self, config: LearnerConfig) -> None:
        """Take the following steps with other settings.

        Raises:
            StartupError: the objective cannot be loaded.
        """
        StepLoss.of(config)
        self._config = config

    def take(
        self,
        groups: Sequence[RolloutGroup],
        expected_kl_nats: Sequence[dict[int, float]],
        *,
        progress: Progress,
    ) -> tuple[StepOutcome, EntropySwitch]:
        """Take a step from ``progress.version``; return its outcome, and the switch once it is taken."""
        settings = StepSettings.of(self._config)
        outcome = self._take(groups, expected_kl_nats, settings, progress=progress, reference=self._reference)
        switch = _switch(progress, settings)
        return outcome, switch.observe(outcome.numbers.surprisal_nats) if outcome.is_applied else switch

    def take_again(self, record: JournalRecord, *, progress: Progress) -> tuple[str, ...]:
        """Take a step from the journal; return which of its settings are not what they were, in words.

        Raises:
            StartupError: it is not finite or teaches nothing now, or torch does not take its random state.
        """
        entry = record.entry
        assert isinstance(entry, StepEntry)
        settings = ReplaySettings.of(entry.settings, self._config, has_reference=self._reference is not None)
        device = self._policy.device
        random_state = RandomState.on(device)
        then = RandomState.from_bytes(record.random_state, cuda_bytes=entry.cuda_state_bytes)
        try:
            then.restore(device)
            outcome = self._take(
                [group_from_wire(group) for group in record.groups],
                entry.expected_kl_nats,
                settings.step,
                progress=progress,
                reference=self._reference if settings.step.reference_kl_coefficient else None,
            )
        finally:
            random_state.restore(device)
        if not outcome.is_applied or not self._policy.is_finite():
            raise StartupError(
                f"step {entry.version} of the journal cannot be taken again: it is not finite or teaches "
                f"nothing now. Settings that differ: {'; '.join(settings.changed) or 'none'}",
                fix="Start the learner with the device and the versions that the journal was written with.",
            )
        return settings.changed

    def _take(
        self,
        groups: Sequence[RolloutGroup],
        expected_kl_nats: Sequence[dict[int, float]],
        settings: StepSettings,
        *,
        progress: Progress,
        reference: ScoringModel | None,
    ) -> StepOutcome:
        is_fast = _switch(progress, settings).is_on
        adopt_settings(self.optimizer, settings)
        return train_step(
            self._policy,
            self.optimizer,
            groups,
            version=progress.version,
            settings=settings.model_copy(update={"fast_steps": settings.fast_steps * is_fast}),
            expected_kl_nats=[
                np.array([nats[version] for version in versions_of_tokens(group).tolist()])
                for group, nats in zip(groups, expected_kl_nats, strict=True)
            ],
            reference=reference,
        )


def versions_of_tokens(group: RolloutGroup) -> NDArray[np.int64]:
    """Return the version that drew each drawn token of a group."""
    versions = [completion.of_drawn(completion.policy_version) for completion in group.completions]
    return np.concatenate(versions).astype(np.int64)


def _switch(progress: Progress, settings: StepSettings) -> EntropySwitch:
    return replace(progress.entropy_switch, threshold=settings.fast_steps_until_deviations)
