"""Groups -> verdicts -> batches -> steps -> checkpoints, one after the other.

    queue --judge--> buffer --batch--> step (thread) --> checkpoint (thread) --> record, gate, log line
               |                          |                '-- disk full: waits for room, again and again
             refused                   not finite: skipped, its groups refused; three in a row end the learner

Decisions are made on the event loop between steps; tensor work and the disk are in one thread
of this loop's own. The order after a step is the guarantee: what the hub or a sampler is told
of a step is in a checkpoint already.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

from learner.admission import AdmissionRules, Judged, judge
from learner.batching import BatchBuffer
from learner.disk_wait import DiskWait
from learner.metrics import DRIFT_AGES, LearnerMetrics
from learner.mismatch import MismatchBook
from learner.step_log import StepLog
from learner.trainee import StepTaken, Trainee, TrainingError
from node.errors import StartupError
from node.rollout import DeliveredGroup, Verdict
from node.rollout_drain import RolloutDrain
from node.run import RunSettings, StepReport
from node.telemetry.metrics import NodeMetrics
from node.until import run_until

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

SKIPPED_STEPS_IN_A_ROW: Final = 3
"""One bad batch is bad data; three from different groups are a broken model or learning rate."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Numbers of the loop; fields as in LearnerConfig."""

    buffer_groups: int
    max_versions: int
    quarantine_mismatch_nats: float


@dataclass(frozen=True, slots=True)
class GroupIdentity:
    """What a group must be about."""

    run_id: str
    tokenizer_digest: bytes


class TrainingLoop:
    """A service that trains until it is stopped or has made ``max_versions``."""

    name = "training loop"

    def __init__(
        self,
        trainee: Trainee,
        *,
        step_log: StepLog,
        settings: LoopSettings,
        identity: GroupIdentity,
        run_settings: Callable[[], Awaitable[RunSettings]],
        drain: RolloutDrain,
        announced: Callable[[int], Coroutine[Any, Any, None]],
        hub_now: Callable[[], float],
        disk_wait: DiskWait,
        metrics: LearnerMetrics,
        node_metrics: NodeMetrics,
    ) -> None:
        """Go on from where ``trainee`` was restored to.

        Args:
            run_settings: waits until the learner has joined.
            announced: waits until the hub announces a version, or a newer one.
            hub_now: Unix seconds on the hub's clock, on which groups are stamped.
        """
        self._trainee = trainee
        self._step_log = step_log
        self._settings = settings
        self._identity = identity
        self._run_settings = run_settings
        self._drain = drain
        self._announced = announced
        self._hub_now = hub_now
        self._disk_wait = disk_wait
        self._metrics = metrics
        self._node_metrics = node_metrics
        self._trained_slots = trainee.trained_slots
        self._skipped_in_a_row = 0
        self._mismatches = MismatchBook(settings.quarantine_mismatch_nats)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training")

    @property
    def version(self) -> int:
        """Version of the newest checkpoint."""
        return self._trainee.version

    @property
    def report(self) -> StepReport | None:
        """What the newest step was like."""
        step = self._trainee.progress.step
        return None if step is None else step.report

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Train until ``stopping``; a step under way is finished first, unless the disk does not take it.

        At ``max_versions`` returns by itself, when the hub announces that version.

        Raises:
            StartupError: the run's settings and this learner's do not go together.
            TrainingError: the parameters, or three gradients in a row, were not finite.
        """
        rules, buffer = self._prepare(await self._run_settings())
        self._metrics.version.set(self.version)
        ready()
        try:
            while not stopping.is_set() and not self._is_complete():
                self._admit_delivered(rules, buffer)
                batch = self._next_batch(buffer)
                if batch:
                    await self._take_step(batch, stopping)
                    continue
                with self._node_metrics.waiting("rollout groups"):
                    await run_until(stopping, self._admit_next(rules, buffer))
            with self._node_metrics.waiting("policy upload"):
                # Nothing to wait for where ``stopping`` ended the loop.
                await run_until(stopping, self._announced(self.version))
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _is_complete(self) -> bool:
        return 0 < self._settings.max_versions <= self.version

    def _prepare(self, run: RunSettings) -> tuple[AdmissionRules, BatchBuffer]:
        if self._settings.buffer_groups < run.batch_groups:
            raise StartupError(
                f"learner.buffer_groups = {self._settings.buffer_groups} never fills a batch of "
                f"{run.batch_groups} groups",
                fix=f"Set learner.buffer_groups to {run.batch_groups} or more",
            )
        policy = self._trainee.policy
        rules = AdmissionRules(
            run_id=self._identity.run_id,
            layout_digest=policy.layout.digest,
            tokenizer_digest=self._identity.tokenizer_digest,
            vocabulary_size=policy.vocabulary_size,
            context_tokens=policy.context_tokens,
            group_size=run.group_size,
            max_staleness_versions=run.max_staleness_versions,
        )
        buffer = BatchBuffer(
            capacity_groups=self._settings.buffer_groups,
            batch_groups=run.batch_groups,
            max_staleness_versions=run.max_staleness_versions,
        )
        return rules, buffer

    async def _admit_next(self, rules: AdmissionRules, buffer: BatchBuffer) -> None:
        self._admit(await self._drain.groups.get(), rules, buffer)

    def _admit_delivered(self, rules: AdmissionRules, buffer: BatchBuffer) -> None:
        while not self._drain.groups.empty():
            self._admit(self._drain.groups.get_nowait(), rules, buffer)

    def _admit(self, delivered: DeliveredGroup, rules: AdmissionRules, buffer: BatchBuffer) -> None:
        group = delivered.group
        judged = self._quarantined(delivered.sampler_id) or judge(
            group, rules, version=self.version, trained_group_ids=self._trained_slots
        )
        self._observe_lag("delivered", since_s=delivered.spooled_at_s)
        if judged.verdict is Verdict.ACCEPTED:
            buffer.add(delivered)
            self._metrics.buffered_groups.set(len(buffer))
        self._tell(delivered, judged.verdict, judged.detail)

    def _quarantined(self, sampler_id: str) -> Judged | None:
        found = self._mismatches.quarantine(sampler_id)
        if found is None:
            return None
        limit = self._settings.quarantine_mismatch_nats
        return Judged(
            Verdict.SUSPECT,
            f"groups of {sampler_id} were {found.nats:.3g} +- {found.error_nats:.2g} nats a token further "
            f"from the learner than their age explains, the bound is {limit:g}: its logprobs are not those "
            "of the version it names. Mend its engine or sampling parameters, then restart the learner",
        )

    def _next_batch(self, buffer: BatchBuffer) -> tuple[DeliveredGroup, ...]:
        for delivered, judged in buffer.evict_stale(self.version):
            self._tell(delivered, judged.verdict, judged.detail)
        batch = buffer.take_batch()
        self._metrics.buffered_groups.set(len(buffer))
        return batch

    def _tell(self, delivered: DeliveredGroup, verdict: Verdict, detail: str) -> None:
        self._metrics.groups.labels(verdict).inc()
        self._drain.judge(delivered.group.group_id, verdict, detail)
        if verdict is Verdict.DUPLICATE:
            self._metrics.doubled_groups.inc()
        if verdict is not Verdict.ACCEPTED:
            _log.warning(
                "group refused",
                extra={
                    "group_id": delivered.group.group_id,
                    "sampler": delivered.sampler_id,
                    "verdict": verdict.value,
                    "detail": detail,
                },
            )

    async def _take_step(self, batch: tuple[DeliveredGroup, ...], stopping: asyncio.Event) -> None:
        unacknowledged = self._drain.unacknowledged
        taken = await self._in_thread(
            lambda: self._trainee.take_step(
                batch,
                unacknowledged=unacknowledged,
                expected_divergence=self._mismatches.expected_divergence,
            )
        )
        if taken is None:
            self._trainee.gate.hold(self.version)
            self._skip(batch)
            return
        self._skipped_in_a_row = 0
        checkpoint_s = await self._disk_wait.until_written(
            f"the checkpoint of version {taken.line.report.version}",
            lambda: self._in_thread(lambda: self._trainee.save(taken)),
            stopping=stopping,
        )
        if checkpoint_s is None:
            # Nobody was told: after the next start the groups are delivered again and trained on.
            return
        self._trained_slots = self._trainee.trained_slots
        self._drain.record(taken.record)
        self._trainee.gate.hold(self.version)
        await self._disk_wait.until_written(
            f"the line of step {taken.line.report.version}",
            lambda: self._in_thread(lambda: self._step_log.append(taken.line)),
            stopping=stopping,
        )
        self._metrics.checkpoint_seconds.observe(checkpoint_s)
        self._show(taken, batch)

    async def _in_thread(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _skip(self, batch: tuple[DeliveredGroup, ...]) -> None:
        self._metrics.skipped_steps.inc()
        self._skipped_in_a_row += 1
        _log.error(
            "step skipped", extra={"version": self.version, "skipped_in_a_row": self._skipped_in_a_row}
        )
        for delivered in batch:
            self._tell(delivered, Verdict.SUSPECT, "the gradient of its batch was not finite")
        if self._skipped_in_a_row == SKIPPED_STEPS_IN_A_ROW:
            raise TrainingError(
                f"{SKIPPED_STEPS_IN_A_ROW} gradients in a row were not finite; version {self.version} stays. "
                "Lower learner.learning_rate, or begin a new run from an older checkpoint"
            )

    def _show(self, taken: StepTaken, batch: tuple[DeliveredGroup, ...]) -> None:
        self._metrics.show_step(taken.line)
        self._mismatches.observe(taken.observed)
        for name in {one.sampler_id for one in taken.observed}:
            self._show_mismatch(name)
        for age_versions in DRIFT_AGES:
            drift = self._mismatches.drift(age_versions)
            self._metrics.drift_nats.labels(str(age_versions)).set(drift.nats)
            self._metrics.drift_error_nats.labels(str(age_versions)).set(drift.error_nats)
        self._metrics.unmeasured_samplers.set(self._mismatches.unmeasured_samplers)
        self._metrics.groups.labels(Verdict.TRAINED).inc(len(batch))
        self._metrics.gate_wait_seconds.observe(taken.gate_wait_s)
        for delivered in batch:
            self._observe_lag("trained", since_s=delivered.spooled_at_s)
            self._observe_lag("total", since_s=delivered.group.sampling_finished_at_s)
        _log.info("step", extra={**asdict(taken.line.report), "tokens": taken.line.tokens})

    def _show_mismatch(self, sampler_id: str) -> None:
        mismatch = self._mismatches.mismatch(sampler_id)
        self._metrics.sampler_mismatch_nats.labels(sampler_id).set(mismatch.nats)
        self._metrics.sampler_mismatch_error_nats.labels(sampler_id).set(mismatch.error_nats)
        measured_groups = self._mismatches.measured_groups(sampler_id)
        self._metrics.sampler_measured_groups.labels(sampler_id).set(measured_groups)

    def _observe_lag(self, stage: str, *, since_s: float) -> None:
        self._metrics.lag_seconds.labels(stage).observe(max(0.0, self._hub_now() - since_s))
