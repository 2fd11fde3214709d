"""Takes groups from lease to submission; every method is an event of one group.

                          .--replied--.
                          v           |
    leased --> prompted --> finished -'-> graded, encoded --> submitted --> settled
       |          |            |            |
       '----------+--- failed, dropped -----' lease given back, with the reason

Prompts, replies and grades are made in other processes, in tasks that end with the sampler's.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any

import numpy as np

from node.errors import Reason, RefusedError
from node.system.clock import Clock
from node.values.groups.failure import Failure
from node.values.groups.rollout import EncodedGroup, LeasePurpose, PromptLease, RolloutGroup
from node.values.groups.verdict import GroupVerdict, Verdict
from node.values.policy import PolicyVersion
from node.wire.rollouts import group_to_wire
from sampler.engines.engine import Engine, GenerationRequest
from sampler.engines.engine_thread import EngineThread
from sampler.metrics import Dropped, SamplerMetrics
from sampler.rollouts.conversation import Conversation
from sampler.rollouts.group_submitter import GroupSubmitter
from sampler.rollouts.group_tally import GroupTally
from sampler.rollouts.leasing import Leasing
from sampler.rollouts.run_task import RunTask
from sampler.rollouts.turn_taking import TurnTaking, split_request_id
from sampler.rollouts.work_queue import NOT_GENERATED, Job, JobState
from sampler.served_policy import ServedPolicy, State
from sampler.tasks.processes.grader_requests import Grades, TaskChangedError, TaskError

logger = logging.getLogger(__name__)


class GroupPipeline:
    """For the event loop's thread; ``open`` comes first.

    Attributes:
        task: Whose prompts are made and graded; set before the first lease.
        task_changed: Set when the task is to be loaded again before the next lease.
        grading: Groups that are generated and not yet graded.
        leasing: Where leases come from and go back to.
    """

    task: RunTask

    def __init__(
        self,
        engine: Engine,
        engine_thread: EngineThread,
        *,
        run_id: str,
        policy: ServedPolicy,
        leasing: Leasing,
        submitter: GroupSubmitter,
        metrics: SamplerMetrics,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._run_id = run_id
        self._policy = policy
        self.leasing = leasing
        self._work_queue = leasing.work_queue
        self._submitter = submitter
        self._metrics = metrics
        self._clock = clock
        self._turns = TurnTaking(engine.tokenizer, engine_thread=engine_thread, metrics=metrics)
        self._tallies = {purpose: GroupTally(now=clock.monotonic()) for purpose in LeasePurpose}
        self._preparing: set[asyncio.Task[None]] = set()
        self._has_trained = False
        """Whether the learner has trained on a group since this process began."""
        self._tasks: asyncio.TaskGroup
        self._offset_s: Callable[[], float]
        self.grading: set[asyncio.Task[None]] = set()
        self._submitting: set[asyncio.Task[None]] = set()
        self.task_changed = asyncio.Event()
        policy.listen(self._note_policy)

    def open(self, tasks: asyncio.TaskGroup, *, offset_s: Callable[[], float]) -> None:
        """Run in ``tasks`` from now on; ``offset_s`` returns how far the hub's clock is ahead of this one."""
        self._tasks, self._offset_s = tasks, offset_s

    def leased(self, lease: PromptLease) -> bool:
        """Begin a lease; return False if it cannot be answered here, and is given back."""
        served = self._policy.served
        is_of_version = lease.policy_version is None or (
            served is not None and lease.policy_version == served.number
        )
        if is_of_version and self.task.has(lease):
            self._work_queue.take(lease, now=self._clock.now())
            self._start(self._prepare(lease), self._preparing)
            return True
        logger.warning(
            "lease for another task" if is_of_version else "lease for another version",
            extra={"lease_id": lease.lease_id, "task": lease.task, "prompt_index": lease.prompt_index},
        )
        self._metrics.dropped_groups.labels(Dropped.REFUSED).inc()
        self.leasing.give_back([lease.lease_id])
        return False

    def finished(self, request: GenerationRequest) -> None:
        """Go on with a group whose turns were drawn."""
        if (spoken := self._turns.note(request, self.task)) is None:
            return
        job, waiting = spoken
        for conversation in waiting:
            self._start(self._reply(job, conversation), self._preparing)
        self._grade_generated(job)

    def refused(self, request_id: str, refused: RefusedError) -> None:
        """Drop a group whose request the engine refuses."""
        is_too_long = refused.reason is Reason.OVER_LIMIT
        fault = Failure.PROMPT_TOO_LONG if is_too_long else Failure.ENGINE_REFUSED
        error = TaskError(str(refused), fault=fault)
        self._fail(split_request_id(request_id)[0], error, Dropped.REFUSED)

    def engine_failed(self) -> None:
        """Return the leases of groups being generated: the engine has lost them."""
        self.leasing.give_back(self._drop({JobState.GENERATING}, Dropped.ENGINE))

    def lost(self, lease_ids: Iterable[str]) -> None:
        """Drop the unfinished work on leases that the hub has given to other samplers."""
        self._drop(NOT_GENERATED, Dropped.LOST, lease_ids)

    def judged(self, verdict: GroupVerdict) -> None:
        """Count the learner's verdict on a group."""
        self._metrics.groups.labels(verdict.verdict).inc()
        fields = {"group_id": verdict.group_id, "verdict": verdict.verdict, "detail": verdict.detail}
        if verdict.verdict is Verdict.TRAINED and not self._has_trained:
            self._has_trained = True
            logger.info("first group trained", extra={"group_id": verdict.group_id})
        logger.debug("verdict", extra=fields)

    def give_back_unfinished(self, reason: Dropped) -> None:
        """Return the leases whose groups are not generated."""
        for step in self._preparing:
            step.cancel()
        self.leasing.give_back(self._drop(NOT_GENERATED, reason))

    async def flushed(self) -> None:
        """Wait until every group that is generated is settled."""
        for steps in (self.grading, self._submitting):
            if steps:
                await asyncio.wait(steps)

    def close(self) -> None:
        """Stop grading and submitting, and log what was submitted since the last log."""
        for step in self.grading | self._submitting:
            step.cancel()
        for purpose, tally in self._tallies.items():
            _log_totals(purpose, tally.rest(now=self._clock.monotonic()))

    def _note_policy(self, was_served: PolicyVersion | None) -> None:
        if was_served is not None and self._policy.state is State.SUSPECT:
            self.leasing.give_back(self._drop({JobState.GENERATING}, Dropped.DOUBTFUL))

    def _start(self, step: Coroutine[Any, Any, None], among: set[asyncio.Task[None]]) -> None:
        started = self._tasks.create_task(step)
        among.add(started)
        started.add_done_callback(among.discard)

    async def _prepare(self, lease: PromptLease) -> None:
        try:
            prompt = await self.task.prompt(lease, self._engine.tokenizer)
        except TaskError as error:
            self._fail(lease.lease_id, error, Dropped.REFUSED)
            return
        self._work_queue.make_ready(lease.lease_id, prompt, now=self._clock.now())
        self._begin_ready()

    def _begin_ready(self) -> None:
        """Generate for ready prompts while the engine has room."""
        while (job := self._work_queue.begin_next(now=self._clock.now())) is not None:
            self._turns.begin(job)
        self.leasing.notice_change()

    async def _reply(self, job: Job, conversation: Conversation) -> None:
        try:
            await self._turns.reply(job, conversation, self.task)
        except TaskError as error:
            self._fail(job.lease.lease_id, error, Dropped.UNGRADED)
        self._grade_generated(job)

    def _grade_generated(self, job: Job) -> None:
        if not self._turns.take_generated(job):
            return
        finished = self._work_queue.finish(job.lease.lease_id, now=self._clock.now())
        self._begin_ready()
        if finished is not None:
            self._start(self._grade(finished), self.grading)

    async def _grade(self, job: Job) -> None:
        assert job.prompt is not None, "a generated job has a prompt"
        finished_at_s = self._clock.now()
        if self.task.description.max_turns > 1:
            for conversation in job.conversations:
                self._metrics.completion_turns.observe(conversation.turns)
        grades = None
        try:
            if self.task.grades:
                _, grades = await self.task.grade(job.prompt, job.conversations)
        except TaskError as error:
            self._fail(job.lease.lease_id, error, Dropped.UNGRADED)
            return
        self.leasing.note_success()
        group = self._group(job, grades, finished_at_s=finished_at_s)
        self._metrics.count_tokens(group.drawn_tokens)
        if grades is not None:
            self._metrics.abstained_completions.inc(grades.rewards.count(None))
        if job.lease.purpose is LeasePurpose.TRAINING and grades is not None:
            self._metrics.reward_mean.set(group.reward_mean)
        self._tallies[job.lease.purpose].made(group)
        self._work_queue.advance(group.group_id, JobState.SUBMITTING)
        job.prompt, job.conversations = None, ()  # the bytes have all of it
        self._start(self._submit(group_to_wire(group)), self._submitting)

    async def _submit(self, group: EncodedGroup) -> None:
        """Submit a group until the hub has answered for it, and forget it."""
        verdict, group_id = await self._submitter.verdict(group), group.group_id
        job = self._work_queue.settle(group_id)
        assert job is not None, "nothing drops a job that is submitted"
        self.leasing.notice_change()
        purpose, now = job.lease.purpose, self._clock.monotonic()
        totals = self._tallies[purpose].answered(group_id, verdict, now=now)
        if verdict is None:
            self._metrics.dropped_groups.labels(Dropped.REFUSED).inc()
            return
        self._metrics.groups.labels(verdict).inc()
        # The witness of `make kills` takes from here which groups are in safe keeping.
        logger.debug("group", extra={"group_id": group_id, "verdict": verdict})
        _log_totals(purpose, totals)

    def _group(self, job: Job, grades: Grades | None, *, finished_at_s: float) -> RolloutGroup:
        """Return what is submitted of a job; without ``grades`` verifiers work out the rewards."""
        assert job.prompt is not None, "a generated job has a prompt"
        lease, graded_at_s, offset_s = job.lease, self._clock.now(), self._offset_s()
        rewards = [math.nan] * len(job.conversations) if grades is None else grades.as_floats
        metrics = {} if grades is None else grades.metrics
        return RolloutGroup(
            run_id=self._run_id,
            group_id=lease.lease_id,
            layout_digest=self._engine.layout.digest,
            tokenizer_digest=self._engine.tokenizer.digest,
            task=lease.task,
            prompt_index=lease.prompt_index,
            prompt_token_ids=job.prompt.token_ids,
            completions=tuple(
                conversation.completion(reward=reward)
                for conversation, reward in zip(job.conversations, rewards, strict=True)
            ),
            sampling=lease.sampling,
            # In order, although the clock may have been set meanwhile.
            sampling_started_at_s=min(job.at_s, finished_at_s, graded_at_s) + offset_s,
            sampling_finished_at_s=min(finished_at_s, graded_at_s) + offset_s,
            graded_at_s=graded_at_s + offset_s,
            task_digest=lease.task_digest,
            grader_digest=self.task.grader_digest,
            metrics={name: np.array(values, np.float32) for name, values in metrics.items()},
        )

    def _fail(self, lease_id: str, error: TaskError, reason: Dropped) -> None:
        """Return a lease that cannot be answered."""
        if isinstance(error, TaskChangedError):
            self.task_changed.set()
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
                "fault": "not the prompt" if error.fault is None else error.fault,
                "detail": str(error),
            },
        )
        if error.fault is not None:
            self._metrics.count_prompt_fault(error.fault)
        self.leasing.give_up(lease_id, error.fault, str(error))

    def _drop(
        self, states: Collection[JobState], reason: Dropped, lease_ids: Iterable[str] | None = None
    ) -> tuple[str, ...]:
        """Forget the jobs in any of ``states``, all or those named; return their leases."""
        dropped = self._work_queue.drop(states, lease_ids)
        self._turns.cancel(dropped)
        self._metrics.dropped_groups.labels(reason).inc(len(dropped))
        self._begin_ready()
        return dropped


def _log_totals(purpose: LeasePurpose, totals: dict[str, Any] | None) -> None:
    if totals is not None:
        logger.info("groups submitted", extra={"purpose": purpose, **totals})
