"""Groups -> verdicts -> batches -> steps -> checkpoints, one after the other.

    queue --judge--> buffer --batch--> step (thread) --> checkpoint (thread) --> record, log line
               |                          |                '-- disk full: waits for room, again and again
             refused                   not finite: skipped, its groups refused; three in a row end the learner

Decisions are made on the event loop between steps; tensor work and disk writes run in one thread of this
loop's own. The order after a step is the guarantee: nobody hears of a step that is not in a checkpoint.
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
from learner.metrics import LearnerMetrics
from learner.step_log import StepLine, StepLog
from learner.training.training_state import Evaluations, StepTaken, TrainingError, TrainingState
from node.clients.rollout_drain import RolloutDrain
from node.errors import StartupError
from node.rollout import DeliveredGroup, GroupVerdict, Verdict
from node.run import RunSettings, StepReport
from node.telemetry.metrics import NodeMetrics
from node.waits import run_until

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

SKIPPED_STEPS_IN_A_ROW: Final = 3
"""One such batch is bad data; three of different groups mean a broken model or learning rate."""

LAST_EVALUATION_LIMIT_S: Final = 900.0
"""Longest wait, at the end of the work, for an evaluation: samplers may be gone for good."""

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
        coordinator_now: Callable[[], float],
        disk_wait: DiskWait,
        metrics: LearnerMetrics,
        node_metrics: NodeMetrics,
    ) -> None:
        """Continue from where ``training_state`` was restored to.

        Args:
            run_settings: waits until the learner has joined.
            announced: waits until the coordinator announces a version, or a newer one.
            evaluations: as the coordinator tells them.
            next_answer: waits until it has told them again.
            on_step: called after a step that the log has, with the groups it consumed; must not block.
            coordinator_now: Unix seconds on the coordinator's clock, which stamps groups.
        """
        self._state = training_state
        self._step_log = step_log
        self._config = config
        self._run_id = run_id
        self._tokenizer_digest = tokenizer_digest
        self._run_settings = run_settings
        self._drain = drain
        self._announced = announced
        self._evaluations = evaluations
        self._next_answer = next_answer
        self._on_step = on_step
        self._coordinator_now = coordinator_now
        self._disk_wait = disk_wait
        self._metrics = metrics
        self._node_metrics = node_metrics
        self._trained_slots = training_state.trained_slots
        self._skipped_in_a_row = 0
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
    def completion(self) -> str:
        """Why there is nothing left to do, in a few words; empty while there is."""
        limit, goal = self._config.max_versions, self._config.stop_at_reward
        if 0 < limit <= self.version:
            return f"done: version {self.version} of {limit}"
        reward = self._state.window_reward_mean
        if goal is not None and reward is not None and reward >= goal:
            window = self._config.stop_window_versions
            return f"done: mean reward {reward:.4g} over {window} versions, the goal is {goal:g}"
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
                with self._node_metrics.waiting("rollout groups"):
                    await run_until(stopping, self._admit_next(rules, buffer))
            if self.completion:
                logger.info("training complete", extra={"version": self.version, "why": self.completion})
                await run_until(stopping, self._hand_over())
            await self._keep_best(stopping)
        finally:
            following.cancel()
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _hand_over(self) -> None:
        """Wait until the coordinator has all of the work, and what is evaluated of it."""
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
        self._report(judged, delivered)

    def _quarantined(self, delivered: DeliveredGroup) -> GroupVerdict | None:
        found = self._mismatches.quarantine(delivered.sampler_id)
        if found is None:
            return None
        limit = self._config.quarantine_mismatch_nats
        return GroupVerdict(
            delivered.group.group_id,
            Verdict.SUSPECT,
            f"groups of {delivered.sampler_id} were {found.nats:.3g} +- {found.error_nats:.2g} nats a token "
            f"further from the learner than their age explains, the bound is {limit:g}: its logprobs are not "
            "those of the version it names. Correct its engine or sampling parameters, then restart the "
            "learner",
        )

    def _next_batch(self, buffer: BatchBuffer) -> tuple[DeliveredGroup, ...]:
        for delivered, judged in buffer.evict_stale(self.version):
            self._report(judged, delivered)
        batch = buffer.take_batch()
        self._metrics.buffered_groups.set(len(buffer))
        return batch

    def _report(self, judged: GroupVerdict, delivered: DeliveredGroup) -> None:
        self._metrics.groups.labels(judged.verdict).inc()
        self._drain.judge(judged)
        if judged.verdict is Verdict.DUPLICATE:
            self._metrics.doubled_groups.inc()
        if judged.verdict is not Verdict.ACCEPTED:
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
        self._trained_slots = self._state.trained_slots
        self._drain.record(taken.record)
        self._state.master_access.hold(self.version)
        self._measure(taken, batch)
        line = self._with_recommendation(taken.line)
        await self._disk_wait.until_written(
            f"the line of step {line.report.version}",
            lambda: self._in_thread(lambda: self._step_log.append(line)),
            stopping=stopping,
        )
        self._metrics.checkpoint_seconds.observe(checkpoint_s)
        self._show(taken, line, batch)
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

    def _measure(self, taken: StepTaken, batch: tuple[DeliveredGroup, ...]) -> None:
        """Add a step to the record of divergence, show the record, and recommend a staleness bound by it."""
        self._mismatches.observe(taken.observed)
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

    def _with_recommendation(self, line: StepLine) -> StepLine:
        """Return the line of a step with the staleness bound that this process recommends."""
        return replace(line, report=replace(line.report, recommended_staleness=self._recommended))

    def _show(self, taken: StepTaken, line: StepLine, batch: tuple[DeliveredGroup, ...]) -> None:
        self._metrics.show_step(line)
        self._show_best()
        self._metrics.groups.labels(Verdict.TRAINED).inc(len(batch))
        self._metrics.gate_wait_seconds.observe(taken.masters_wait_s)
        for delivered in batch:
            self._observe_lag("trained", since_s=delivered.spooled_at_s)
            self._observe_lag("total", since_s=delivered.group.sampling_finished_at_s)
        fields = {**asdict(line.report), "recommended_staleness": self._recommended.versions}
        logger.info("step", extra={**fields, "tokens": line.tokens})

    def _observe_lag(self, stage: str, *, since_s: float) -> None:
        self._metrics.lag_seconds.labels(stage).observe(max(0.0, self._coordinator_now() - since_s))
