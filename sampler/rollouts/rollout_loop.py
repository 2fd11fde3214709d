"""The sampler's work: leases in, graded groups of completions out.

    load the task --> lease, generate, grade, submit --stopping--> give back, flush
         ^                    |
         '--- task changed ---'

The loop never waits for weights: the engine samples from the newest version handed over. It never waits for
a task's code either: prompts are made ahead, in other processes. While the hub is away it works on the leases
it has and keeps finished groups. To stop, it takes no more leases, gives back those whose groups are not
generated, and submits the rest.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Final

from node.clients.membership.join_call import OwnTask
from node.clients.membership.membership_client import MembershipClient
from node.errors import ConfigError, RefusedError, StartupError
from node.rpc.call_ends import ConnectionLost
from node.system.waits import run_until, wait_at_most
from node.telemetry.metrics import NodeMetrics
from sampler.config import SamplerConfig
from sampler.engines.engine_thread import EngineThread
from sampler.engines.restartable_engine import EngineFaultError
from sampler.metrics import Dropped, SamplerMetrics
from sampler.rollouts.group_pipeline import GroupPipeline
from sampler.rollouts.run_task import RunTask

logger = logging.getLogger(__name__)

LOAD_AGAIN_S: Final = 60.0
"""Until a task that could not be loaded is tried again: what it lacked may have been installed meanwhile."""


class RolloutLoop:
    """A service, ready once it knows its task."""

    name = "rollouts"

    def __init__(
        self,
        pipeline: GroupPipeline,
        *,
        membership: MembershipClient,
        engine_thread: EngineThread,
        config: SamplerConfig,
        flush_timeout_s: float,
        metrics: SamplerMetrics,
        node_metrics: NodeMetrics,
    ) -> None:
        """Connect the parts; ``flush_timeout_s``: how long to submit finished groups when stopping."""
        self._pipeline = pipeline
        self._membership = membership
        self._engine_thread = engine_thread
        self._config = config
        self._flush_timeout_s = flush_timeout_s
        self._metrics = metrics
        self._node_metrics = node_metrics
        self._leasing = pipeline.leasing
        self._has_failed = asyncio.Event()
        self._fault: Exception | None = None

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Sample until ``stopping``, then submit what is finished.

        Raises:
            ConfigError: this sampler does not know the run's task, cannot use its class or lacks a package
                that it needs, or task and data do not fit each other.
            StartupError: the task does not start.
            RefusedError: TASK_MISMATCH, if the run's task has another number of prompts; BASE_MISMATCH, if
                its learner began with another model.
        """
        await self._load()
        try:
            await run_until(stopping, self._tell_task())
            async with asyncio.TaskGroup() as tasks:
                self._pipeline.open(tasks, offset_s=lambda: self._membership.heartbeats.clock_offset_s)
                generating = tasks.create_task(self._generate())
                filling = tasks.create_task(self._fill_engine())
                ready()
                while not stopping.is_set() and not self._has_failed.is_set():
                    await run_until(stopping, run_until(self._has_failed, self._lease()))
                await self._finish()
                generating.cancel()
                filling.cancel()
            if self._fault is not None:
                raise self._fault
        finally:
            await self._pipeline.task.graders.close()

    async def _generate(self) -> None:
        try:
            await self._engine_thread.run(
                finished=self._pipeline.finished,
                refused=self._pipeline.refused,
                failed=self._pipeline.engine_failed,
            )
        except (EngineFaultError, StartupError, ConfigError) as error:
            self._fault = error
            self._has_failed.set()

    async def _fill_engine(self) -> None:
        await self._leasing.fill_engine(
            lambda: self._engine_thread.use,
            are_graders_late=lambda: self._pipeline.task.graders.waiting > 0,
            is_set=self._config.concurrency_groups is not None,
        )

    async def _lease(self) -> None:
        """Lease until the task changes, then load it again."""
        await run_until(self._pipeline.task_changed, self._leasing.run(self._pipeline.leased))
        await self._load_again()

    async def _load(self) -> None:
        settings = await self._membership.settings()
        self._leasing.bound_versions = settings.max_staleness_versions
        self._pipeline.task = await RunTask.load(
            settings.task,
            json.loads(settings.task_options_json or "{}"),
            digest=settings.task_digest,
            rows=settings.prompts,
            group_size=settings.group_size,
            config=self._config,
            metrics=self._metrics,
            grades=not settings.verifiers_grade,
        )

    async def _tell_task(self) -> None:
        task = self._pipeline.task
        await self._membership.tell_task(OwnTask(task.prompts, task.digest, task.grader_digest))

    async def _load_again(self) -> None:
        """Load the task as it is now; wait and say so where it cannot be had here.

        Groups not yet generated are given back. Those being graded are finished: the hub says what they are
        worth.
        """
        self._pipeline.give_back_unfinished(Dropped.TASK)
        if self._pipeline.grading:
            await asyncio.wait(self._pipeline.grading)
        await self._pipeline.task.graders.close()
        while True:
            self._pipeline.task_changed.clear()
            try:
                await self._load()
                await self._tell_task()
            except (ConfigError, StartupError, RefusedError) as error:
                logger.error(
                    "the run's task cannot be loaded here; waiting until it can", extra={"detail": str(error)}
                )
            else:
                task = self._pipeline.task
                self._leasing.note_success()
                digest = task.description.code_digest.hex()
                logger.warning(
                    "task loaded again", extra={"task_digest": task.digest.hex(), "grader_digest": digest}
                )
                return
            with self._node_metrics.waiting("task that loads here"):
                await wait_at_most(self._pipeline.task_changed, LOAD_AGAIN_S)

    async def _finish(self) -> None:
        self._pipeline.give_back_unfinished(Dropped.STOPPING)
        try:
            async with asyncio.timeout(self._flush_timeout_s):
                try:
                    await self._leasing.give_back_now()
                except (ConnectionLost, RefusedError) as error:
                    logger.warning("leases not given back; they will expire", extra={"detail": str(error)})
                await self._pipeline.flushed()
        except TimeoutError:
            groups = len(self._leasing.work_queue)
            logger.warning("finished groups not submitted", extra={"groups": groups})
            self._metrics.dropped_groups.labels(Dropped.STOPPING).inc(groups)
        self._pipeline.close()
