"""Decides what a learner does next: obey an operator, admit groups, take a step, wait, or end.

    groups --group_intake--> batch --step_taker--> step --checkpoint_writer--> now and then a checkpoint
    orders --order_taker---> settings, rollbacks                  coordinator: the best version, the end

Decisions are made on the event loop between steps. One thread of this loop's own reads groups, takes steps
and writes the journal.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from learner.intake.batch_buffer import BatchBuffer
from learner.metrics import Instruments
from learner.step_log import StepLog
from learner.training.checkpoint_writer import CheckpointWriter
from learner.training.coordinator import Coordinator, hand_over
from learner.training.evidence import Evidence
from learner.training.group_intake import GroupIntake, group_rules
from learner.training.merge_taker import MergeTaker
from learner.training.order_taker import OrderTaker, VersionStager
from learner.training.step_records import OnStep, StepRecords
from learner.training.step_taker import StepTaker
from learner.training.training_state import TrainingState
from learner.training.work_thread import WorkThread
from node.clients.rollouts.rollout_drain import RolloutDrain
from node.serving.merge_servicer import MergeServicer
from node.system.waits import drop, run_until
from node.values.run import RunSettings

logger = logging.getLogger(__name__)


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
        earlier: VersionStager,
        was_skipped: Callable[[int], bool],
        instruments: Instruments,
        contributors: MergeServicer | None = None,
    ) -> None:
        """Continue from where ``training_state`` was restored to.

        Args:
            buffer: in which ``drain`` puts what it receives.
            earlier: versions that an operator may order a rollback to.
            was_skipped: returns whether a version was made and never published.
            contributors: where those are served whose steps are merged; None: steps are taken here.
        """
        self._state = training_state
        self._coordinator = coordinator
        self._buffer = buffer
        self._drain = drain
        self._evidence = evidence
        self._step_log = step_log
        self._on_step = on_step
        self._earlier = earlier
        self._was_skipped = was_skipped
        self._instruments = instruments
        self._node_metrics = instruments.node_metrics
        self._contributors = contributors

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
        state, drain, instruments = self._state, self._drain, self._instruments
        thread = WorkThread("training", instruments.disk_wait, stopping=stopping)
        checkpoints = CheckpointWriter(state, instruments, training=thread, stopping=stopping)
        intake = GroupIntake(
            self._buffer,
            group_rules(run, state, self._coordinator, was_skipped=self._was_skipped),
            state=state,
            drain=drain,
            evidence=self._evidence,
            thread=thread,
            now=self._coordinator.now,
            metrics=instruments.metrics,
        )
        records = StepRecords(
            state,
            coordinator=self._coordinator,
            intake=intake,
            drain=drain,
            evidence=self._evidence,
            step_log=self._step_log,
            on_step=self._on_step,
            thread=thread,
            instruments=instruments,
        )
        steps = StepTaker(state, records, drain=drain, thread=thread, instruments=instruments)
        merges = self._merges(run, records, intake, thread)
        orders = OrderTaker(
            self._earlier,
            state=state,
            drain=drain,
            step_log=self._step_log,
            thread=thread,
            checkpoints=checkpoints,
            metrics=instruments.metrics,
        )
        instruments.metrics.version.set(self.version)
        ready()
        following = asyncio.create_task(self._follow_best(thread))
        following.add_done_callback(lambda _: drain.wake())
        try:
            while not stopping.is_set() and not state.completion:
                if following.done():
                    following.result()
                await orders.obey()
                for group in await intake.admit():
                    if self.version == 0:
                        self._on_step(None, [group])
                is_made = False
                if merges is not None:
                    is_made = await merges.advance()
                elif batch := intake.next_batch(run.batch_groups, task_digest=self._coordinator.task_digest):
                    await steps.take(batch)
                    is_made = True
                if is_made:
                    self._show_best()
                    await checkpoints.begin_if_due()
                elif not self._buffer.arrived:
                    records.groups_wait_s += await self._wait_for_groups(stopping, merges)
            if why := state.completion:
                logger.info("training complete", extra={"version": self.version, "why": why})
                await run_until(stopping, self._hand_over())
            await self._keep_best(thread)
            await checkpoints.write_last()
        finally:
            drop(following)
            checkpoints.close()
            thread.close()

    def _merges(
        self, run: RunSettings, records: StepRecords, intake: GroupIntake, thread: WorkThread
    ) -> MergeTaker | None:
        if self._contributors is None:
            return None
        return MergeTaker(
            self._state,
            records,
            self._contributors,
            run,
            coordinator=self._coordinator,
            buffer=self._buffer,
            intake=intake,
            drain=self._drain,
            thread=thread,
            instruments=self._instruments,
        )

    async def _wait_for_groups(self, stopping: asyncio.Event, merges: MergeTaker | None) -> float:
        """Wait until something has come, or time makes something due; return the seconds without groups.

        A learner that merges waits for contributors, too, which is no lack of groups.
        """
        started_s = self._instruments.clock.monotonic()
        limit_s = None if merges is None else merges.pause_s
        what, who = ("rollout groups", "") if merges is None else merges.waits_for
        with self._node_metrics.waiting(what, who), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await run_until(stopping, self._drain.arrival())
        return self._instruments.clock.monotonic() - started_s if what == "rollout groups" else 0.0

    async def _hand_over(self) -> None:
        self._state.master_access.end()
        await hand_over(self._coordinator, self._drain, version=self.version, node_metrics=self._node_metrics)

    async def _follow_best(self, thread: WorkThread) -> None:
        """Write down which version is the best when the coordinator says so, between two steps."""
        while True:
            await self._coordinator.next_answer()
            if self._state.history.has_news_of_best(self._coordinator.evaluations):
                await self._keep_best(thread)

    async def _keep_best(self, thread: WorkThread) -> None:
        await thread.until_written(
            "the best version", lambda: self._state.history.keep_best(self._coordinator.evaluations)
        )
        self._show_best()

    def _show_best(self) -> None:
        if (best := self._state.best_version) is not None:
            self._instruments.metrics.best_version.set(best)
