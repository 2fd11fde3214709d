"""Decides who hears of a step, and when: nobody before the journal has it.

    step --on disk--> record to the coordinator, evidence, line of the log, writers
    none ----------> its groups are consumed by a verdict, and the version stays, since an unchanged policy
                     grows no staler

The same for steps that were taken on groups and for merges of contributions.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Final

from learner.metrics import Instruments
from learner.step_log import StepLine, StepLog
from learner.training.coordinator import Coordinator
from learner.training.evidence import Evidence
from learner.training.group_intake import GroupIntake
from learner.training.step_taken import StepTaken
from learner.training.training_state import TrainingState
from learner.training.work_thread import WorkThread
from node.clients.rollouts.rollout_drain import RolloutDrain
from node.values.groups.rollout import RolloutGroup
from node.values.groups.verdict import GroupVerdict, Verdict

logger = logging.getLogger(__name__)

OnStep = Callable[[StepLine | None, Sequence[RolloutGroup]], None]
"""Told of a step that the log has with the groups it consumed, and of some batches that taught nothing. None:
groups admitted before the first step. Must not block."""

IDLE_BATCHES_A_SAMPLE: Final = 64
"""One of so many batches in a row that teach nothing is written down for people."""

UNINFORMATIVE: Final = "no group of its batch teaches anything: every advantage or weight is 0"
NOT_FINITE: Final = "the gradient of its batch was not finite"


class StepRecords:
    """Makes steps durable, then tells of them, from the event loop's thread."""

    def __init__(
        self,
        state: TrainingState,
        *,
        coordinator: Coordinator,
        intake: GroupIntake,
        drain: RolloutDrain,
        evidence: Evidence,
        step_log: StepLog,
        on_step: OnStep,
        thread: WorkThread,
        instruments: Instruments,
    ) -> None:
        """Work in ``thread``; verdicts go through ``intake``, records through ``drain``."""
        self._state = state
        self._coordinator = coordinator
        self._intake = intake
        self._drain = drain
        self._evidence = evidence
        self._step_log = step_log
        self._on_step = on_step
        self._thread = thread
        self._metrics = instruments.metrics
        self.groups_wait_s = 0.0
        """Wait for groups since the step before, as the training loop adds it up."""

    async def keep(self, taken: StepTaken, batch: Sequence[RolloutGroup]) -> bool:
        """Make a step durable, then tell of it; False if the learner was stopped while the disk was full.

        Nobody is told then: after the next start the groups are delivered again and trained on.
        """
        journal_s = await self._thread.until_written(
            f"the journal's entry of step {taken.line.version}",
            lambda: self._state.save(taken, self._coordinator.evaluations),
        )
        if journal_s is None:
            return False
        if taken.record is not None:
            self._drain.record(taken.record, trained_slots=self._state.trained_slots.runs)
            self._state.master_access.hold(self._state.version)
        await self._weigh_evidence(taken, batch)
        if taken.record is None:
            self._pass_over(taken.line, batch)
        else:
            await self._write_down(taken.line, batch, journal_s=journal_s)
        return True

    def refuse(self, groups: Sequence[RolloutGroup], *, verdict: Verdict = Verdict.SUSPECT) -> None:
        """Refuse groups whose gradient was not finite.

        Args:
            verdict: UNINFORMATIVE where only a contributor says so, whose word is held against no sampler.
        """
        for group in groups:
            self._intake.report(GroupVerdict(group.group_id, verdict, NOT_FINITE), group.sampler_id)

    async def _weigh_evidence(self, taken: StepTaken, batch: Sequence[RolloutGroup]) -> None:
        """Note what the groups show of their samplers; quarantine and release."""
        quarantined = frozenset(self._drain.quarantined)
        decided = await self._evidence.weigh(taken, batch, quarantined=quarantined, thread=self._thread)
        for name, why in decided.items():
            self._drain.quarantine(name, why)

    async def _write_down(self, line: StepLine, batch: Sequence[RolloutGroup], *, journal_s: float) -> None:
        """Log and show a step that is durable."""
        version, publish_s = self._state.master_access.newest_published or (None, None)
        line = replace(
            self._evidence.completed(line),
            journal_s=journal_s,
            published_version=version,
            publish_s=publish_s,
        )
        self.groups_wait_s = 0.0
        await self._thread.until_written(
            f"the line of step {line.version}", lambda: self._step_log.append(line)
        )
        self._metrics.journal_seconds.observe(journal_s)
        self._show(line, batch)
        self._on_step(line, batch)

    def _pass_over(self, line: StepLine, batch: Sequence[RolloutGroup]) -> None:
        """Consume a batch that taught nothing, without a step."""
        for group in batch:
            verdict = GroupVerdict(group.group_id, Verdict.UNINFORMATIVE, UNINFORMATIVE)
            self._intake.report(verdict, group.sampler_id)
        self._metrics.uninformative_batches.inc()
        self._metrics.show_batch(line)
        if self._evidence.idle_batches % IDLE_BATCHES_A_SAMPLE == 1:
            self._on_step(line, batch)
        fields = {"version": line.version, "groups": len(batch), "reward_mean": line.reward_mean}
        logger.info("batch taught nothing, no step taken", extra=fields)

    def _show(self, line: StepLine, batch: Sequence[RolloutGroup]) -> None:
        self._metrics.show_step(line)
        self._metrics.groups.labels(Verdict.TRAINED).inc(len(batch))
        self._metrics.gate_wait_seconds.observe(line.masters_wait_s or 0.0)
        for group in batch:
            self._intake.observe_lags(trained=group.spooled_at_s, total=group.sampling_finished_at_s)
        report, recommended = asdict(line.report()), line.recommended_staleness
        report["recommended_staleness"] = recommended and recommended.versions
        logger.info("step", extra={**report, "tokens": line.numbers.tokens})
