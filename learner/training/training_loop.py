"""Groups -> verdicts -> batches -> steps -> checkpoints, one after the other.

    queue --judge--> buffer --batch--> step (thread) --> checkpoint (thread) --> record, log line
               |                          |                '-- disk full: waits for room, again and again
             refused                   |-- teaches nothing: no step; its groups are consumed
                                       '-- not finite: skipped, its groups refused; three in a row end all

Decisions are made on the event loop between steps; tensor work and disk writes run in one thread of this
loop's own. The order after a step is the guarantee: nobody hears of a step that is not in a checkpoint.
Groups of a batch that teaches nothing are consumed by a verdict, and the version stays: an unchanged policy
grows no staler.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, Final, TypeVar

from learner.config import LearnerConfig
from learner.disk_wait import DiskWait
from learner.intake.batch_buffer import BatchBuffer
from learner.intake.divergence_panel import KNOTS, Estimate
from learner.intake.group_verdict import GroupRules, judge
from learner.intake.sampler_mismatch import SamplerMismatches
from learner.intake.staleness_bound import LEAST_GROUPS, WeighedSample, recommended_staleness
from learner.intake.teaching_record import TeachingRecord
from learner.metrics import LearnerMetrics
from learner.step_log import StepLine, StepLog
from learner.training.training_state import Evaluations, StepTaken, TrainingError, TrainingState
from node.clients.rollout_drain import RolloutDrain
from node.clock import Clock
from node.errors import StartupError
from node.rollout import DeliveredGroup, GroupVerdict, Verdict
from node.run import RunSettings, StepReport, Teaching
from node.telemetry.lag import believed_lag_s
from node.telemetry.metrics import NodeMetrics
from node.waits import run_until

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

SKIPPED_STEPS_IN_A_ROW: Final = 3
"""One such batch is bad data; three of different groups mean a broken model or learning rate."""

LAST_EVALUATION_LIMIT_S: Final = 900.0
"""Longest wait, at the end of the work, for an evaluation: samplers may be gone for good."""

IDLE_BATCHES_A_SAMPLE: Final = 64
"""Of batches in a row that teach nothing, every so many are written down for people."""

_UNINFORMATIVE: Final = "no group of its batch teaches anything: every advantage or weight is 0"

_UNKNOWN: Final = Estimate(math.nan, math.nan)


class TrainingLoop:
    """A service that trains until it is stopped, has made ``max_versions`` or reached ``stop_at_reward``."""

    name = "training loop"

    def __init__(
        self,
        training_state: TrainingState,
        *,
        step_log: StepLog,
        config: LearnerConfig,
        run_id: str,
        tokenizer_digest: bytes,
        run_settings: Callable[[], Awaitable[RunSettings]],
        drain: RolloutDrain,
        announced: Callable[[int], Coroutine[Any, Any, None]],
        evaluations: Evaluations,
        next_answer: Callable[[], Coroutine[Any, Any, None]],
        on_step: Callable[[StepLine, Sequence[DeliveredGroup]], None],
        published: Callable[[], tuple[int, float] | None],
        coordinator_now: Callable[[], float],
        clock: Clock,
        disk_wait: DiskWait,
        metrics: LearnerMetrics,
        node_metrics: NodeMetrics,
        task_digest: Callable[[], bytes | None] = lambda: None,
        on_first: Callable[[DeliveredGroup], None] = lambda _: None,
    ) -> None:
        """Continue from where ``training_state`` was restored to.

        Args:
            run_settings: waits until the learner has joined.
            announced: waits until the coordinator announces a version, or a newer one.
            evaluations: as the coordinator tells them.
            next_answer: waits until it has told them again.
            on_step: called after a step that the log has, with the groups it consumed, and with some batches
                that taught nothing; must not block.
            published: the newest version that was published, and the seconds that took; None: none was.
            coordinator_now: Unix seconds on the coordinator's clock, which stamps groups.
            on_first: called with each group that is admitted before the first step; must not block.
            task_digest: of the options by which the run's groups are graded now; None: not told.
        """
        self._state = training_state
        self._step_log = step_log
        self._config = config
        self._run_id = run_id
        self._tokenizer_digest = tokenizer_digest
        self._run_settings = run_settings
        self._task_digest = task_digest
        self._on_first = on_first
        self._drain = drain
        self._announced = announced
        self._evaluations = evaluations
        self._next_answer = next_answer
        self._on_step = on_step
        self._published = published
        self._coordinator_now = coordinator_now
        self._clock = clock
        self._disk_wait = disk_wait
        self._metrics = metrics
        self._node_metrics = node_metrics
        self._trained_slots = training_state.trained_slots
        self._skipped_in_a_row = 0
        self._groups_wait_s = 0.0
        self._teaching = TeachingRecord(now=clock.monotonic())
        self._mismatches = SamplerMismatches(config.quarantine_mismatch_nats)
        self._sample = WeighedSample.of(config.objective, config.objective_options)
        self._recommended = recommended_staleness({}, sample=self._sample, tokens=0.0)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training")

    @property
    def version(self) -> int:
        """Version of the newest checkpoint."""
        return self._state.version

    @property
    def report(self) -> StepReport | None:
        """The report of the newest step, with the staleness bound that this process has measured."""
        step = self._state.progress.step
        return None if step is None else self._with_recommendation(step).report

    @property
    def teaching(self) -> Teaching | None:
        """How much the newest batches taught; None before the first."""
        return self._teaching.report(now=self._clock.monotonic())

    @property
    def completion(self) -> str:
        """Why there is nothing left to do, in a few words; empty while there is."""
        limit, goal = self._config.max_versions, self._config.stop_at_reward
        if 0 < limit <= self.version:
            return f"done: version {self.version} of {limit}"
        reward = self._state.window_reward_mean
        if goal is not None and reward is not None and reward >= goal:
            window = self._config.stop_window_versions
            return f"done: mean reward {reward:.4g} over {window} batches, the goal is {goal:g}"
        return ""

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Train until ``stopping``; a step under way is finished first, unless the disk does not take it.

        Returns by itself at ``completion``, once the coordinator has the last version and step, and the
        evaluations that are due by then have ended.

        Raises:
            StartupError: this learner's buffer is too small for the run's batches.
            TrainingError: the parameters, or three gradients in a row, were not finite.
        """
        rules, buffer = self._prepare(await self._run_settings())
        self._metrics.version.set(self.version)
        ready()
        following = asyncio.create_task(self._follow_best(stopping))
        try:
            while not stopping.is_set() and not self.completion:
                if following.done():
                    following.result()
                self._admit_delivered(rules, buffer)
                batch = self._next_batch(buffer)
                if batch:
                    await self._take_step(batch, stopping)
                    continue
                started_s = self._clock.monotonic()
                with self._node_metrics.waiting("rollout groups"):
                    await run_until(stopping, self._admit_next(rules, buffer))
                self._groups_wait_s += self._clock.monotonic() - started_s
            if self.completion:
                logger.info("training complete", extra={"version": self.version, "why": self.completion})
                await run_until(stopping, self._hand_over())
            await self._keep_best(stopping)
        finally:
            following.cancel()
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _hand_over(self) -> None:
        """Wait until the coordinator has all of the work, and what is evaluated of it."""
        self._state.master_access.end()
        if self.version > 0:  # version 0 is everybody's base model, and is never announced
            with self._node_metrics.waiting("policy upload"):
                await self._announced(self.version)
        with self._node_metrics.waiting("step acknowledgement"):
            await self._drain.acknowledged()
        try:
            with self._node_metrics.waiting("evaluation"):
                async with asyncio.timeout(LAST_EVALUATION_LIMIT_S):
                    while not self._is_evaluated():
                        await self._next_answer()
        except TimeoutError:
            logger.warning(
                "an evaluation has not ended; `heterorl-node evaluations` shows it",
                extra={"version": self._evaluations().under_way, "waited_s": LAST_EVALUATION_LIMIT_S},
            )

    def _is_evaluated(self) -> bool:
        """Whether the coordinator has said since the last version that no evaluation is under way or due."""
        told = self._evaluations()
        return told.announced >= self.version and told.under_way is None

    async def _follow_best(self, stopping: asyncio.Event) -> None:
        """Write down which version is the best when the coordinator says so, between two steps."""
        while True:
            await self._next_answer()
            if self._state.has_news_of_best(self._evaluations()):
                await self._keep_best(stopping)

    async def _keep_best(self, stopping: asyncio.Event) -> None:
        await self._disk_wait.until_written(
            "the best version",
            lambda: self._in_thread(lambda: self._state.keep_best(self._evaluations())),
            stopping=stopping,
        )
        self._show_best()

    def _show_best(self) -> None:
        if (best := self._state.progress.best) is not None:
            self._metrics.best_version.set(best.version)

    def _prepare(self, run: RunSettings) -> tuple[GroupRules, BatchBuffer]:
        if self._config.buffer_groups < run.batch_groups:
            raise StartupError(
                f"learner.buffer_groups = {self._config.buffer_groups} never fills a batch of "
                f"{run.batch_groups} groups",
                fix=f"Set learner.buffer_groups to {run.batch_groups} or more",
            )
        policy = self._state.policy
        rules = GroupRules(
            run_id=self._run_id,
            layout_digest=policy.layout.digest,
            tokenizer_digest=self._tokenizer_digest,
            vocabulary_size=policy.vocabulary_size,
            context_tokens=policy.context_tokens,
            group_size=run.group_size,
            max_staleness_versions=run.max_staleness_versions,
        )
        buffer = BatchBuffer(
            capacity_groups=self._config.buffer_groups,
            batch_groups=run.batch_groups,
            max_staleness_versions=run.max_staleness_versions,
        )
        return rules, buffer

    async def _admit_next(self, rules: GroupRules, buffer: BatchBuffer) -> None:
        self._admit(await self._drain.groups.get(), rules, buffer)

    def _admit_delivered(self, rules: GroupRules, buffer: BatchBuffer) -> None:
        while not self._drain.groups.empty():
            self._admit(self._drain.groups.get_nowait(), rules, buffer)

    def _admit(self, delivered: DeliveredGroup, rules: GroupRules, buffer: BatchBuffer) -> None:
        judged = self._quarantined(delivered) or judge(
            delivered.group, rules, version=self.version, trained_group_ids=self._trained_slots
        )
        self._observe_lag("delivered", since_s=delivered.spooled_at_s)
        if judged.verdict is Verdict.ACCEPTED:
            buffer.add(delivered)
            self._metrics.buffered_groups.set(len(buffer))
            if self.version == 0:
                self._on_first(delivered)
        self._report(judged, delivered)

    def _quarantined(self, delivered: DeliveredGroup) -> GroupVerdict | None:
        why = self._drain.quarantined.get(delivered.sampler_id)
        if why is None or self._mismatches.takes_probe(delivered.sampler_id, now=self._coordinator_now()):
            return None
        return GroupVerdict(
            delivered.group.group_id,
            Verdict.SUSPECT,
            f"{delivered.sampler_id} is quarantined: {why}. Correct its engine or sampling: a group is "
            "measured every few minutes, and it is released once they fit, or by `heterorl-node pardon`",
        )

    def _next_batch(self, buffer: BatchBuffer) -> tuple[DeliveredGroup, ...]:
        evicted = buffer.evict_stale(self.version)
        if (task_digest := self._task_digest()) is not None:
            evicted += buffer.evict_misgraded(task_digest)
        for delivered, judged in evicted:
            self._report(judged, delivered)
        batch = buffer.take_batch()
        self._metrics.buffered_groups.set(len(buffer))
        return batch

    def _report(self, judged: GroupVerdict, delivered: DeliveredGroup) -> None:
        self._metrics.groups.labels(judged.verdict).inc()
        self._drain.judge(judged)
        if judged.verdict is Verdict.DUPLICATE:
            self._metrics.doubled_groups.inc()
        if judged.verdict not in (Verdict.ACCEPTED, Verdict.UNINFORMATIVE):
            fields = {**asdict(judged), "sampler": delivered.sampler_id}
            logger.warning("group refused", extra=fields)

    async def _take_step(self, batch: tuple[DeliveredGroup, ...], stopping: asyncio.Event) -> None:
        unacknowledged = self._drain.unacknowledged
        taken = await self._in_thread(
            lambda: self._state.take_step(
                batch,
                unacknowledged=unacknowledged,
                expected_divergence=self._mismatches.panel.expected,
                evaluations=self._evaluations,
            )
        )
        if taken is None:
            self._state.master_access.hold(self.version)
            self._skip(batch)
            return
        self._skipped_in_a_row = 0
        checkpoint_s = await self._disk_wait.until_written(
            f"the checkpoint of version {taken.line.report.version}",
            lambda: self._in_thread(lambda: self._state.save(taken)),
            stopping=stopping,
        )
        if checkpoint_s is None:
            # Nobody was told: after the next start the groups are delivered again and trained on.
            return
        if taken.record is not None:
            self._trained_slots = self._state.trained_slots
            self._drain.record(taken.record)
            self._state.master_access.hold(self.version)
        self._measure(taken, batch)
        if taken.record is None:
            self._pass_over(taken.line, batch)
            return
        version, publish_s = self._published() or (None, None)
        line = replace(
            self._with_recommendation(taken.line),
            groups_wait_s=self._groups_wait_s,
            checkpoint_s=checkpoint_s,
            published_version=version,
            publish_s=publish_s,
        )
        self._groups_wait_s = 0.0
        await self._disk_wait.until_written(
            f"the line of step {line.report.version}",
            lambda: self._in_thread(lambda: self._step_log.append(line)),
            stopping=stopping,
        )
        self._metrics.checkpoint_seconds.observe(checkpoint_s)
        self._show(line, batch)
        self._on_step(line, batch)

    async def _in_thread(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _skip(self, batch: tuple[DeliveredGroup, ...]) -> None:
        self._metrics.skipped_steps.inc()
        self._skipped_in_a_row += 1
        logger.error(
            "step skipped", extra={"version": self.version, "skipped_in_a_row": self._skipped_in_a_row}
        )
        for delivered in batch:
            detail = "the gradient of its batch was not finite"
            self._report(GroupVerdict(delivered.group.group_id, Verdict.SUSPECT, detail), delivered)
        if self._skipped_in_a_row == SKIPPED_STEPS_IN_A_ROW:
            raise TrainingError(
                f"{SKIPPED_STEPS_IN_A_ROW} gradients in a row were not finite; version {self.version} stays. "
                "Lower learner.learning_rate, or begin a new run from an older checkpoint"
            )

    def _pass_over(self, line: StepLine, batch: tuple[DeliveredGroup, ...]) -> None:
        """Consume a batch that taught nothing, without a step."""
        for delivered in batch:
            self._report(
                GroupVerdict(delivered.group.group_id, Verdict.UNINFORMATIVE, _UNINFORMATIVE), delivered
            )
        self._metrics.uninformative_batches.inc()
        self._metrics.show_batch(line)
        self._show_best()
        if self._teaching.idle_batches % IDLE_BATCHES_A_SAMPLE == 1:
            self._on_step(line, batch)
        fields = {"version": self.version, "groups": len(batch), "reward_mean": line.report.reward_mean}
        logger.info("batch taught nothing, no step taken", extra=fields)

    def _measure(self, taken: StepTaken, batch: tuple[DeliveredGroup, ...]) -> None:
        """Add a batch to the records of teaching and divergence, show them, recommend a staleness bound."""
        now, line = self._clock.monotonic(), taken.line
        taught, rewarded = line.teaching_groups or 0, line.report.reward_mean
        self._teaching.add(groups=len(batch), teaching_groups=taught, reward_mean=rewarded, now=now)
        if (teaching := self._teaching.report(now=now)) is not None:
            self._metrics.uninformative_ratio.set(teaching.uninformative_groups / teaching.groups)
        found = self._mismatches.observe(taken.observed, quarantined=self._drain.quarantined)
        for name, estimate in found.beyond.items():
            self._drain.quarantine(name, self._why(estimate))
        for name in found.content:
            self._drain.quarantine(name, "")
        panel = self._mismatches.panel
        tokens = taken.line.tokens / sum(len(delivered.group.completions) for delivered in batch)
        drift = panel.drift_by_age(least_groups=LEAST_GROUPS)
        self._recommended = recommended_staleness(drift, sample=self._sample, tokens=tokens)
        for age_versions in KNOTS[1:]:
            measured = drift.get(age_versions, _UNKNOWN)
            expected_nats = panel.expected_drift(age_versions)
            self._metrics.show_age(
                age_versions,
                drift_nats=measured.nats,
                drift_error_nats=measured.error_nats,
                expected_drift_nats=expected_nats,
                expected_ess_ratio=self._sample.share(expected_nats, tokens=tokens),
            )
        self._metrics.unmeasured_samplers.set(self._mismatches.unmeasured_samplers)
        for name in {one.sampler_id for one in taken.observed}:
            mismatch = panel.mismatch(name)
            self._metrics.sampler_mismatch_nats.labels(name).set(mismatch.nats)
            self._metrics.sampler_mismatch_error_nats.labels(name).set(mismatch.error_nats)
            self._metrics.sampler_measured_groups.labels(name).set(panel.groups(name))

    def _why(self, mismatch: Estimate) -> str:
        return (
            f"its groups were {mismatch.nats:.3g} +- {mismatch.error_nats:.2g} nats a token further from the "
            f"learner than age explains (bound {self._config.quarantine_mismatch_nats:g}): its logprobs "
            "are not those of the version it names"
        )

    def _with_recommendation(self, line: StepLine) -> StepLine:
        """Return the line of a step with the staleness bound that this process recommends."""
        return replace(line, report=replace(line.report, recommended_staleness=self._recommended))

    def _show(self, line: StepLine, batch: tuple[DeliveredGroup, ...]) -> None:
        self._metrics.show_step(line)
        self._show_best()
        self._metrics.groups.labels(Verdict.TRAINED).inc(len(batch))
        self._metrics.gate_wait_seconds.observe(line.masters_wait_s or 0.0)
        for delivered in batch:
            self._observe_lag("trained", since_s=delivered.spooled_at_s)
            self._observe_lag("total", since_s=delivered.group.sampling_finished_at_s)
        fields = {**asdict(line.report), "recommended_staleness": self._recommended.versions}
        logger.info("step", extra={**fields, "tokens": line.tokens})

    def _observe_lag(self, stage: str, *, since_s: float) -> None:
        lag_s = believed_lag_s(since_s, now=self._coordinator_now())
        if lag_s is not None:
            self._metrics.lag_seconds.labels(stage).observe(lag_s)
