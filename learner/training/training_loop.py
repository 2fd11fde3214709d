"""Groups -> verdicts -> batches -> steps -> journal, one after the other.

    intake -----batch--> step (thread) --> journal (thread) --> record, line --> checkpoint,
       |                    |                '-- disk full: waits               written in
    refused                 |                    for room                       another thread
                            |-- teaches nothing: no step; its groups are consumed
                            '-- not finite: skipped, its groups refused; three in a row end all

Decisions are made on the event loop between steps. One thread of this loop's own reads groups, takes steps
and writes the journal. The order after a step is the guarantee: nobody hears of a step that is not in the
journal.
Groups of a batch that teaches nothing are consumed by a verdict, and the version stays: an unchanged policy
grows no staler.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Final, Protocol, TypeVar

from learner.intake.batch_buffer import BatchBuffer
from learner.intake.group_verdict import GroupRules
from learner.intake.named_versions import Scored
from learner.journal.restart import Due
from learner.metrics import Instruments
from learner.step_log import StepLine, StepLog
from learner.training.checkpoint_writer import CheckpointWriter
from learner.training.evidence import Evidence
from learner.training.group_intake import GroupIntake
from learner.training.order_taker import OrderTaker
from learner.training.training_state import StepTaken, TrainingError, TrainingState
from node.clients.rollout_drain import RolloutDrain
from node.errors import StartupError
from node.system.waits import drop, run_until
from node.values.evaluation import EvaluationNotice
from node.values.rollout import RolloutGroup
from node.values.run import RunSettings
from node.values.verdict import GroupVerdict, Verdict

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

OnStep = Callable[[StepLine | None, Sequence[RolloutGroup]], None]
"""Told of a step that the log has with the groups it consumed, and of some batches that taught nothing. None:
groups admitted before the first step. Must not block."""

Score = Callable[[Sequence[RolloutGroup], int], Mapping[int, Scored | None]]
"""Scores groups by a version that the first of them names, at the learner's version: by their places, None
where the words are gone; those that do not name it are left out. Blocking."""

SKIPPED_STEPS_IN_A_ROW: Final = 3
"""One such batch is bad data; three of different groups mean a broken model or learning rate."""

LAST_EVALUATION_LIMIT_S: Final = 900.0
"""Longest wait, at the end of the work, for an evaluation: samplers may be gone for good."""

IDLE_BATCHES_A_SAMPLE: Final = 64
"""One of so many batches in a row that teach nothing is written down for people."""

_UNINFORMATIVE: Final = "no group of its batch teaches anything: every advantage or weight is 0"


class Coordinator(Protocol):
    """The coordinator, as the loop sees it."""

    run_id: str
    tokenizer_digest: bytes
    """As joined with."""

    async def settings(self) -> RunSettings:
        """Wait until the learner has joined; return the run's settings."""
        ...

    async def announced(self, version: int) -> None:
        """Wait until a version, or a newer one, is announced."""
        ...

    async def next_answer(self) -> None:
        """Wait for the next answer to a heartbeat."""
        ...

    @property
    def evaluations(self) -> EvaluationNotice:
        """Evaluations, as the last answer told them. Any thread."""
        ...

    @property
    def task_digest(self) -> bytes | None:
        """Digest of the options by which the run's groups are graded now; None: not told."""
        ...

    def now(self) -> float:
        """Return Unix seconds on the coordinator's clock, which stamps groups."""
        ...


class TrainingLoop:
    """A service that trains until it is stopped, has made ``max_versions`` or reached ``stop_at_reward``."""

    name = "training loop"

    def __init__(
        self,
        training_state: TrainingState,
        *,
        coordinator: Coordinator,
        buffer: BatchBuffer,
        drain: RolloutDrain,
        evidence: Evidence,
        step_log: StepLog,
        on_step: OnStep,
        operator: OrderTaker,
        instruments: Instruments,
        score: Score | None = None,
    ) -> None:
        """Continue from where ``training_state`` was restored to.

        Args:
            buffer: in which ``drain`` puts what it receives.
            score: where the evidence asks for it; None: earlier versions' words cannot be used.
        """
        self._score = score
        self._state = training_state
        self._coordinator = coordinator
        self._buffer = buffer
        self._drain = drain
        self._evidence = evidence
        self._step_log = step_log
        self._on_step = on_step
        self._operator = operator
        self._clock = instruments.clock
        self._disk_wait = instruments.disk_wait
        self._metrics = instruments.metrics
        self._node_metrics = instruments.node_metrics
        self._checkpoints = CheckpointWriter(training_state, instruments)
        self._skipped_in_a_row = 0
        self._groups_wait_s = 0.0
        self._intake: GroupIntake
        """Once the run's settings are known."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training")

    @property
    def version(self) -> int:
        """Version of the newest step in the journal."""
        return self._state.version

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Train until ``stopping``; a step under way is finished first, unless the disk does not take it.

        Then a checkpoint is written, so that the next start has no steps to take again.

        Returns by itself at ``TrainingState.completion``, once the coordinator has the last version and step,
        and the evaluations that are due by then have ended.

        Raises:
            StartupError: this learner's buffer is too small for the run's batches.
            TrainingError: the parameters, or three gradients in a row, were not finite.
        """
        run = await self._coordinator.settings()
        self._intake = self._opened_intake(run)
        self._metrics.version.set(self.version)
        ready()
        following = asyncio.create_task(self._follow_best(stopping))
        following.add_done_callback(lambda _: self._drain.wake())
        try:
            while not stopping.is_set() and not self._state.completion:
                if following.done():
                    following.result()
                await self._obey(stopping)
                await self._admit()
                task_digest = self._coordinator.task_digest
                if batch := self._intake.next_batch(run.batch_groups, task_digest=task_digest):
                    await self._take_step(batch, stopping)
                elif not self._buffer.arrived:
                    await self._wait_for_groups(stopping)
            if why := self._state.completion:
                logger.info("training complete", extra={"version": self.version, "why": why})
                await run_until(stopping, self._hand_over())
            await self._keep_best(stopping)
            await self._last_checkpoint(stopping)
        finally:
            drop(following)
            self._checkpoints.close()
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _hand_over(self) -> None:
        """Wait until the coordinator has all of the work, and what is evaluated of it."""
        self._state.master_access.end()
        if self.version > 0:  # version 0 is everybody's base model, and is never announced
            with self._node_metrics.waiting("policy upload"):
                await self._coordinator.announced(self.version)
        with self._node_metrics.waiting("step acknowledgement"):
            await self._drain.acknowledged()
        try:
            with self._node_metrics.waiting("evaluation"):
                async with asyncio.timeout(LAST_EVALUATION_LIMIT_S):
                    while not self._is_evaluated():
                        await self._coordinator.next_answer()
        except TimeoutError:
            logger.warning(
                "an evaluation has not ended; `heterorl-node status` shows it",
                extra={
                    "version": self._coordinator.evaluations.under_way,
                    "waited_s": LAST_EVALUATION_LIMIT_S,
                },
            )

    def _is_evaluated(self) -> bool:
        """Whether the coordinator has said since the last version that no evaluation is under way or due."""
        told = self._coordinator.evaluations
        return told.announced >= self.version and told.under_way is None

    async def _follow_best(self, stopping: asyncio.Event) -> None:
        """Write down which version is the best when the coordinator says so, between two steps."""
        while True:
            await self._coordinator.next_answer()
            if self._state.has_news_of_best(self._coordinator.evaluations):
                await self._keep_best(stopping)

    async def _keep_best(self, stopping: asyncio.Event) -> None:
        await self._disk_wait.until_written(
            "the best version",
            lambda: self._in_thread(lambda: self._state.keep_best(self._coordinator.evaluations)),
            stopping=stopping,
        )
        self._show_best()

    def _show_best(self) -> None:
        if (best := self._state.progress.best) is not None:
            self._metrics.best_version.set(best.version)

    def _opened_intake(self, run: RunSettings) -> GroupIntake:
        if self._state.config.buffer_groups < run.batch_groups:
            raise StartupError(
                f"learner.buffer_groups = {self._state.config.buffer_groups} never fills a batch of "
                f"{run.batch_groups} groups",
                fix=f"Set learner.buffer_groups to {run.batch_groups} or more",
            )
        policy = self._state.policy
        rules = GroupRules(
            run_id=self._coordinator.run_id,
            layout_digest=policy.layout.digest,
            tokenizer_digest=self._coordinator.tokenizer_digest,
            vocabulary_size=policy.vocabulary_size,
            context_tokens=policy.scorer.context_tokens,
            objection=policy.scorer.objection,
            group_size=run.group_size,
            max_staleness_versions=run.max_staleness_versions,
        )
        return GroupIntake(
            self._buffer,
            rules,
            state=self._state,
            drain=self._drain,
            evidence=self._evidence,
            now=self._coordinator.now,
            metrics=self._metrics,
        )

    async def _obey(self, stopping: asyncio.Event) -> None:
        """Do what an operator has asked for since the last look."""
        if (order := await self._operator.take(self._in_thread)) is not None:
            await self._end_checkpoint()
            await self._operator.roll_back(order, self._in_thread, self._checkpoints, stopping)

    async def _admit(self) -> None:
        for group in await self._intake.admit(self._in_thread):
            if self.version == 0:
                self._on_step(None, [group])

    async def _wait_for_groups(self, stopping: asyncio.Event) -> None:
        started_s = self._clock.monotonic()
        with self._node_metrics.waiting("rollout groups"):
            await run_until(stopping, self._drain.arrival())
        self._groups_wait_s += self._clock.monotonic() - started_s

    async def _take_step(self, batch: tuple[RolloutGroup, ...], stopping: asyncio.Event) -> None:
        unacknowledged = self._drain.unacknowledged
        taken = await self._in_thread(
            lambda: self._state.take_step(
                batch,
                unacknowledged=unacknowledged,
                evaluations=lambda: self._coordinator.evaluations,
            )
        )
        if taken is None:
            self._state.master_access.hold(self.version)
            self._skip(batch)
            return
        self._skipped_in_a_row = 0
        journal_s = await self._disk_wait.until_written(
            f"the journal's entry of step {taken.line.version}",
            lambda: self._in_thread(lambda: self._state.save(taken)),
            stopping=stopping,
        )
        if journal_s is None:
            # Nobody was told: after the next start the groups are delivered again and trained on.
            return
        if taken.record is not None:
            self._drain.record(taken.record, trained_slots=self._state.trained_slots.runs)
            self._state.master_access.hold(self.version)
        await self._weigh_evidence(taken, batch)
        if taken.record is None:
            self._pass_over(taken.line, batch)
        else:
            await self._write_down(taken.line, batch, journal_s=journal_s, stopping=stopping)
        await self._checkpoint_if_due(stopping)

    async def _weigh_evidence(self, taken: StepTaken, batch: tuple[RolloutGroup, ...]) -> None:
        """Note what the groups show of their samplers; quarantine and release."""
        quarantined = frozenset(self._drain.quarantined)
        findings = self._evidence.observe(
            taken.line,
            taken.observed,
            completions=sum(len(group.completions) for group in batch),
            quarantined=quarantined,
        )
        quarantines = dict(findings.quarantines)
        for places in findings.to_score:
            is_probe = batch[places[0]].sampler_id in quarantined
            scored = await self._scored([batch[place] for place in places], is_probe=is_probe)
            for place, shown in scored.items():
                observed = taken.observed[places[place]]
                quarantines |= self._evidence.scored(observed, shown, is_probe=is_probe)
        for name, why in quarantines.items():
            self._drain.quarantine(name, why)

    async def _scored(self, groups: Sequence[RolloutGroup], *, is_probe: bool) -> Mapping[int, Scored | None]:
        score, version, started_s = self._score, self.version, self._clock.monotonic()
        scored = {} if score is None else await self._in_thread(lambda: score(groups, version))
        if not is_probe:
            self._evidence.took(self._clock.monotonic() - started_s)
        return scored

    async def _checkpoint_if_due(self, stopping: asyncio.Event) -> None:
        """Begin a checkpoint if one is due and none is being written; let training wait where it must."""
        due = self._state.checkpoint_due()
        if self._checkpoints.is_written or (due is Due.NOW and not self._checkpoints.is_free):
            await self._end_checkpoint()
        if due is not Due.NOT and self._checkpoints.is_free:
            started_s = self._clock.monotonic()
            copied = await self._in_thread(self._state.copy)
            self._metrics.checkpoint_copy_seconds.observe(self._clock.monotonic() - started_s)
            self._checkpoints.begin(copied, stopping)
            if due is Due.NOW:
                await self._end_checkpoint()
        self._metrics.journal_bytes.set(self._state.journal_bytes)

    async def _end_checkpoint(self) -> None:
        with self._node_metrics.waiting("checkpoint"):
            if await self._checkpoints.end():
                await self._in_thread(self._state.written)

    async def _last_checkpoint(self, stopping: asyncio.Event) -> None:
        """Write a checkpoint of the newest step, unless there is one; a full disk is not waited for."""
        await self._end_checkpoint()
        if self._state.has_new_steps:
            self._checkpoints.begin(await self._in_thread(self._state.copy), stopping)
            await self._end_checkpoint()

    async def _write_down(
        self,
        line: StepLine,
        batch: tuple[RolloutGroup, ...],
        *,
        journal_s: float,
        stopping: asyncio.Event,
    ) -> None:
        """Log and show a step that is durable."""
        version, publish_s = self._state.master_access.newest_published or (None, None)
        line = replace(
            self._evidence.completed(line),
            groups_wait_s=self._groups_wait_s,
            journal_s=journal_s,
            published_version=version,
            publish_s=publish_s,
        )
        self._groups_wait_s = 0.0
        await self._disk_wait.until_written(
            f"the line of step {line.version}",
            lambda: self._in_thread(lambda: self._step_log.append(line)),
            stopping=stopping,
        )
        self._metrics.journal_seconds.observe(journal_s)
        self._show(line, batch)
        self._on_step(line, batch)

    async def _in_thread(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _skip(self, batch: tuple[RolloutGroup, ...]) -> None:
        self._metrics.skipped_steps.inc()
        self._skipped_in_a_row += 1
        logger.error(
            "step skipped", extra={"version": self.version, "skipped_in_a_row": self._skipped_in_a_row}
        )
        for group in batch:
            detail = "the gradient of its batch was not finite"
            self._intake.report(GroupVerdict(group.group_id, Verdict.SUSPECT, detail), group.sampler_id)
        if self._skipped_in_a_row == SKIPPED_STEPS_IN_A_ROW:
            raise TrainingError(
                f"{SKIPPED_STEPS_IN_A_ROW} gradients in a row were not finite; version {self.version} stays. "
                "Lower learner.learning_rate, or begin a new run from an older checkpoint"
            )

    def _pass_over(self, line: StepLine, batch: tuple[RolloutGroup, ...]) -> None:
        """Consume a batch that taught nothing, without a step."""
        for group in batch:
            verdict = GroupVerdict(group.group_id, Verdict.UNINFORMATIVE, _UNINFORMATIVE)
            self._intake.report(verdict, group.sampler_id)
        self._metrics.uninformative_batches.inc()
        self._metrics.show_batch(line)
        self._show_best()
        if self._evidence.idle_batches % IDLE_BATCHES_A_SAMPLE == 1:
            self._on_step(line, batch)
        fields = {"version": self.version, "groups": len(batch), "reward_mean": line.reward_mean}
        logger.info("batch taught nothing, no step taken", extra=fields)

    def _show(self, line: StepLine, batch: tuple[RolloutGroup, ...]) -> None:
        self._metrics.show_step(line)
        self._show_best()
        self._metrics.groups.labels(Verdict.TRAINED).inc(len(batch))
        self._metrics.gate_wait_seconds.observe(line.masters_wait_s or 0.0)
        for group in batch:
            self._intake.observe_lags(trained=group.spooled_at_s, total=group.sampling_finished_at_s)
        report, recommended = asdict(line.report()), line.recommended_staleness
        report["recommended_staleness"] = recommended and recommended.versions
        logger.info("step", extra={**report, "tokens": line.numbers.tokens})
