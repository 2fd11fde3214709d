"""The sampler's work: leases in, graded groups of completions out.

                         .--reply--.
                         v         |
    lease --> prompt --> generate -'-> grade --> submission queue --> hub
      ^         '--failed--+-------------'                            ^
      |                    '--> given back, with the reason ----------+
      `---- a lease is taken only if there is room for its group -----'

The loop never waits for weights: the engine samples from the newest version handed over. It never waits for
a task's code either: prompts are made ahead, in other processes. While the hub is away it works on the leases
it has and keeps finished groups. To stop, it takes no more leases, gives back those whose groups are not
generated, and submits the rest.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from node.clients.membership_client import MembershipClient
from node.clock import Clock
from node.errors import ConfigError, Reason, RefusedError, StartupError
from node.failure import FailedLease, Failure
from node.rollout import GroupVerdict, LeasePurpose, PromptLease, RolloutGroup, Verdict
from node.rpc.channel import ConnectionLost
from node.run import RunSettings
from node.telemetry.metrics import NodeMetrics
from node.waits import run_until, wait_at_most
from sampler.engines.engine import Engine, FinishedRequest
from sampler.engines.engine_thread import EngineThread
from sampler.engines.restartable_engine import EngineFaultError
from sampler.metrics import Dropped, SamplerMetrics
from sampler.rollouts.conversation import Conversation
from sampler.rollouts.graded_group import graded_group
from sampler.rollouts.group_submitter import GroupSubmitter
from sampler.rollouts.group_tally import GroupTally, SubmittedGroups
from sampler.rollouts.leasing import Leasing
from sampler.rollouts.run_task import RunTask
from sampler.rollouts.turn_taking import GroupInTurns, TurnTaking, split_request_id
from sampler.rollouts.work_queue import NOT_GENERATED, Job, JobState, WorkQueue
from sampler.tasks.grader_pool import GraderPool
from sampler.tasks.grader_process import TaskChangedError, TaskError
from sampler.tasks.task import TaskSetup

logger = logging.getLogger(__name__)

LOAD_AGAIN_S: Final = 60.0
"""Until a task that could not be loaded is tried again: what it lacked may have been installed meanwhile."""


class RolloutLoop:
    """A service, ready once it knows its task."""

    name = "rollouts"

    def __init__(
        self,
        engine: Engine,
        *,
        run_id: str,
        membership: MembershipClient,
        engine_thread: EngineThread,
        leasing: Leasing,
        submitter: GroupSubmitter,
        work_queue: WorkQueue,
        task_setup: Callable[..., TaskSetup],
        make_graders: Callable[[TaskSetup], GraderPool],
        flush_timeout_s: float,
        metrics: SamplerMetrics,
        node_metrics: NodeMetrics,
        clock: Clock,
    ) -> None:
        """Connect the parts.

        Args:
            task_setup: Returns what a task of this name and these options is here, given ``group_size``;
                blocks for a moment, and raises ConfigError or StartupError.
            make_graders: Makes the graders of a task.
            flush_timeout_s: How long a stopping sampler tries to submit finished groups.
        """
        self._engine = engine
        self._run_id = run_id
        self._membership = membership
        self._engine_thread = engine_thread
        self._leasing = leasing
        self._submitter = submitter
        self._work_queue = work_queue
        self._task_setup = task_setup
        self._make_graders = make_graders
        self._flush_timeout_s = flush_timeout_s
        self._metrics = metrics
        self._clock = clock
        self._turns = TurnTaking(engine.tokenizer, engine_thread=engine_thread, metrics=metrics)
        self._node_metrics = node_metrics
        self._task_changed = asyncio.Event()
        self._tallies = {purpose: GroupTally(now=clock.monotonic()) for purpose in LeasePurpose}

    def forget_lost(self, lease_ids: Iterable[str]) -> None:
        """Drop the unfinished work on leases that the hub has given to other samplers."""
        self._drop(self._work_queue.drop(NOT_GENERATED, lease_ids), Dropped.LOST)

    def forget_doubtful(self) -> None:
        """Drop the groups being generated: the policy they are drawn from may be no version at all."""
        self._drop_generating(Dropped.DOUBTFUL)

    def note_task_change(self) -> None:
        """Load the task again before the next lease is taken."""
        self._task_changed.set()

    def note_verdict(self, verdict: GroupVerdict) -> None:
        """Count the learner's verdict on a group."""
        self._metrics.groups.labels(verdict.verdict).inc()
        logger.debug(
            "verdict",
            extra={"group_id": verdict.group_id, "verdict": verdict.verdict, "detail": verdict.detail},
        )

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Sample until ``stopping``, then submit what is finished.

        Raises:
            ConfigError: this sampler does not know the run's task, cannot use its class or lacks a package
                that it needs, or task and data do not fit each other.
            StartupError: the task does not start.
            RefusedError: TASK_MISMATCH, if the run's task has another number of prompts; BASE_MISMATCH, if
                its learner began with another model.
        """
        self._task = await self._loaded(await self._membership.settings())
        try:
            await run_until(stopping, self._tell_task())
            await self._sample(ready, stopping)
        finally:
            await self._task.graders.close()

    async def _loaded(self, settings: RunSettings) -> RunTask:
        setup = await asyncio.to_thread(
            self._task_setup,
            settings.task,
            json.loads(settings.task_options_json or "{}"),
            group_size=settings.group_size,
        )
        graders = self._make_graders(setup)
        self._metrics.watch_graders(processes=lambda: graders.processes, queue=lambda: graders.waiting)
        try:
            return await RunTask.start(
                settings.task, setup, graders, rows=settings.prompts, digest=settings.task_digest
            )
        except BaseException:
            await graders.close()
            raise

    async def _tell_task(self) -> None:
        task = self._task
        await self._membership.tell_task(
            task.prompts, task_digest=task.digest, grader_digest=task.code_digest
        )

    async def _load_again(
        self, preparing: Collection[asyncio.Task[None]], grading: Collection[asyncio.Task[None]]
    ) -> None:
        """Load the task as it is now; wait and say so where it cannot be had here.

        Groups not yet generated are given back. Those being graded are finished: the hub says what they are
        worth.
        """
        for step in preparing:
            step.cancel()
        dropped = self._work_queue.drop(NOT_GENERATED)
        self._drop(dropped, Dropped.TASK)
        self._leasing.give_back(dropped)
        if grading:
            await asyncio.wait(grading)
        await self._task.graders.close()
        while True:
            self._task_changed.clear()
            try:
                self._task = await self._loaded(await self._membership.settings())
                await self._tell_task()
            except (ConfigError, StartupError, RefusedError) as error:
                logger.error(
                    "the run's task cannot be loaded here; waiting until it can", extra={"detail": str(error)}
                )
            else:
                self._leasing.note_success()
                digests = {
                    "task_digest": self._task.digest.hex(),
                    "grader_digest": self._task.code_digest.hex(),
                }
                logger.warning("task loaded again", extra=digests)
                return
            with self._node_metrics.waiting("task that loads here"):
                await wait_at_most(self._task_changed, LOAD_AGAIN_S)

    async def _take_rows(self, prompts: int) -> None:
        """Go on with the same task and more rows."""
        self._task_changed.clear()
        self._task = replace(self._task, prompts=prompts)
        await self._tell_task()

    async def _sample(self, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        preparing: set[asyncio.Task[None]] = set()
        grading: set[asyncio.Task[None]] = set()

        def start(step: Coroutine[Any, Any, None], among: set[asyncio.Task[None]]) -> None:
            started = tasks.create_task(step)
            among.add(started)
            started.add_done_callback(among.discard)

        def take(lease: PromptLease) -> bool:
            if not self._takes(lease):
                return False
            self._work_queue.take(lease, now=self._clock.now())
            start(self._prepare(lease), preparing)
            return True

        def go_on(finished: FinishedRequest) -> None:
            if (spoken := self._turns.note(finished, self._task)) is None:
                return
            group, waiting = spoken
            for conversation in waiting:
                start(reply(group, conversation), preparing)
            grade_generated(group)

        async def reply(group: GroupInTurns, conversation: Conversation) -> None:
            try:
                await self._turns.reply(group, conversation, self._task)
            except TaskError as error:
                self._fail_task(group.lease_id, error, Dropped.UNGRADED)
            grade_generated(group)

        def grade_generated(group: GroupInTurns) -> None:
            if not self._turns.take_generated(group):
                return
            job = self._work_queue.finish(group.lease_id, now=self._clock.now())
            self._begin_ready()
            if job is not None:
                start(self._grade(job, group.conversations), grading)

        has_ended = asyncio.Event()
        faults: list[Exception] = []

        async def generate() -> None:
            try:
                await self._engine_thread.run(
                    finished=go_on, refused=self._refuse, failed=lambda: self._drop_generating(Dropped.ENGINE)
                )
            except (EngineFaultError, StartupError, ConfigError) as error:
                faults.append(error)
                has_ended.set()

        async with asyncio.TaskGroup() as tasks:
            generating = tasks.create_task(generate())
            submitting = tasks.create_task(self._submitter.run(self._settle))
            ready()
            while not stopping.is_set() and not has_ended.is_set():
                leasing = run_until(self._task_changed, self._leasing.run(take))
                await run_until(stopping, run_until(has_ended, leasing))
                if not self._task_changed.is_set() or stopping.is_set():
                    continue
                settings = await self._membership.settings()
                has_rows_only = settings.task_digest == self._task.digest and settings.prompts
                again = (
                    self._take_rows(settings.prompts)
                    if has_rows_only and settings.prompts != self._task.prompts
                    else self._load_again(preparing, grading)
                )
                await run_until(stopping, run_until(has_ended, again))
            for step in preparing:
                step.cancel()
            await self._finish(grading)
            generating.cancel()
            submitting.cancel()
        for error in faults:  # one at most
            raise error

    async def _finish(self, grading: set[asyncio.Task[None]]) -> None:
        dropped = self._work_queue.drop(NOT_GENERATED)
        self._drop(dropped, Dropped.STOPPING)
        self._leasing.give_back(dropped)
        try:
            async with asyncio.timeout(self._flush_timeout_s):
                await self._give_back()
                if grading:
                    await asyncio.wait(grading)
                await self._submitter.flushed()
        except TimeoutError:
            logger.warning("finished groups not submitted", extra={"groups": len(self._work_queue)})
            self._metrics.dropped_groups.labels(Dropped.STOPPING).inc(len(self._work_queue))
            for step in grading:
                step.cancel()
        for purpose, tally in self._tallies.items():
            _log_totals(purpose, tally.rest(now=self._clock.monotonic()))

    async def _give_back(self) -> None:
        try:
            await self._leasing.give_back_now()
        except (ConnectionLost, RefusedError) as error:
            logger.warning("leases not given back; they will expire", extra={"detail": str(error)})

    def _takes(self, lease: PromptLease) -> bool:
        served = self._engine_thread.served
        is_of_version = lease.policy_version is None or (
            served is not None and lease.policy_version == served.number
        )
        if is_of_version and self._task.has(lease):
            return True
        logger.warning(
            "lease for another task" if is_of_version else "lease for another version",
            extra={"lease_id": lease.lease_id, "task": lease.task, "prompt_index": lease.prompt_index},
        )
        self._metrics.dropped_groups.labels(Dropped.REFUSED).inc()
        self._leasing.give_back([lease.lease_id])
        return False

    async def _prepare(self, lease: PromptLease) -> None:
        try:
            with self._metrics.prompt_seconds.time():
                prompt = await self._task.prompt(lease, self._engine.tokenizer)
        except TaskError as error:
            self._fail_task(lease.lease_id, error, Dropped.REFUSED)
            return
        self._work_queue.make_ready(lease.lease_id, prompt, now=self._clock.now())
        self._begin_ready()

    def _begin_ready(self) -> None:
        """Generate for ready prompts while the engine has room."""
        while (job := self._work_queue.begin_next(now=self._clock.now())) is not None:
            self._turns.begin(job)
        self._leasing.notice_change()

    def _refuse(self, request_id: str, refused: RefusedError) -> None:
        is_too_long = refused.reason is Reason.OVER_LIMIT
        fault = Failure.PROMPT_TOO_LONG if is_too_long else Failure.ENGINE_REFUSED
        self._fail(split_request_id(request_id)[0], fault, str(refused), Dropped.REFUSED)

    async def _grade(self, job: Job, conversations: Sequence[Conversation]) -> None:
        task = self._task
        finished_at_s = self._clock.now()
        self._metrics.group_seconds.observe(finished_at_s - job.at_s)
        has_replies = task.max_turns > 1
        if has_replies:
            for conversation in conversations:
                self._metrics.completion_turns.observe(conversation.turns)
        texts = [conversation.completion_text(has_replies=has_replies) for conversation in conversations]
        try:
            with self._metrics.grade_seconds.time():
                grades = await task.grade(job, texts)
        except TaskError as error:
            self._fail_task(job.lease.lease_id, error, Dropped.UNGRADED)
            return
        self._leasing.note_success()
        group = graded_group(
            job,
            conversations,
            grades,
            run_id=self._run_id,
            grader_digest=task.code_digest,
            layout_digest=self._engine.layout.digest,
            tokenizer_digest=self._engine.tokenizer.digest,
            finished_at_s=finished_at_s,
            graded_at_s=self._clock.now(),
            offset_s=self._membership.clock_offset_s,
        )
        self._metrics.tokens.inc(group.drawn_tokens)
        if job.lease.purpose is LeasePurpose.TRAINING:
            self._metrics.reward_mean.set(group.reward_mean)
        self._work_queue.advance(group.group_id, JobState.SUBMITTING)
        await self._submitter.put(group)

    def _settle(self, group: RolloutGroup, verdict: Verdict | None) -> None:
        job = self._work_queue.settle(group.group_id)
        assert job is not None, "nothing drops a job that is submitted"
        purpose = job.lease.purpose
        self._leasing.notice_change()
        if verdict is None:
            self._metrics.dropped_groups.labels(Dropped.REFUSED).inc()
            return
        self._metrics.groups.labels(verdict).inc()
        tally, now = self._tallies[purpose], self._clock.monotonic()
        _log_totals(purpose, tally.add(group, verdict, now=now))
        logger.debug(
            "group",
            extra={
                "group_id": group.group_id,
                "purpose": purpose,
                "prompt_index": group.prompt_index,
                "verdict": verdict,
                "reward_mean": round(group.reward_mean, 4),
                "oldest_version": group.oldest_version,
                "newest_version": group.newest_version,
                "tokens": group.drawn_tokens,
                "sampled_s": round(group.sampling_finished_at_s - group.sampling_started_at_s, 3),
                "graded_s": round(group.graded_at_s - group.sampling_finished_at_s, 3),
            },
        )

    def _fail_task(self, lease_id: str, error: TaskError, reason: Dropped) -> None:
        self._fail(lease_id, error.fault, str(error), reason)
        if isinstance(error, TaskChangedError):
            self.note_task_change()

    def _fail(self, lease_id: str, fault: Failure | None, detail: str, reason: Dropped) -> None:
        """Return a lease that cannot be answered; ``fault`` is None if the prompt is not the cause."""
        self._turns.cancel([lease_id])
        job = self._work_queue.settle(lease_id)
        self._begin_ready()
        if job is None:
            return
        self._metrics.dropped_groups.labels(reason).inc()
        logger.warning(
            "lease not answered",
            extra={
                "lease_id": lease_id,
                "prompt_index": job.lease.prompt_index,
                "fault": "not the prompt" if fault is None else fault,
                "detail": detail,
            },
        )
        if fault is None:
            self._leasing.give_back([lease_id])
            self._leasing.note_failure()
        else:
            self._metrics.count_prompt_fault(fault)
            self._leasing.give_up(FailedLease(lease_id, fault, detail))

    def _drop_generating(self, reason: Dropped) -> None:
        dropped = self._work_queue.drop({JobState.GENERATING})
        self._drop(dropped, reason)
        self._leasing.give_back(dropped)

    def _drop(self, lease_ids: Sequence[str], reason: Dropped) -> None:
        self._turns.cancel(lease_ids)
        self._metrics.dropped_groups.labels(reason).inc(len(lease_ids))
        self._begin_ready()


def _log_totals(purpose: LeasePurpose, totals: SubmittedGroups | None) -> None:
    if totals is not None:
        logger.info("groups submitted", extra={"purpose": purpose, **asdict(totals)})
