"""Leases in, groups out: what a sampler is for.

    lease --> render --> generate --> grade --> outbox --> hub
      ^                                                     |
      `---- room: nothing is taken that could not be kept --'

It never waits for weights: the engine samples from the newest version handed over. While the hub is
away it goes on with the leases it has and keeps what is finished. When stopping it takes no more
leases, gives back those still generating and hands in what is finished.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from node.clock import Clock
from node.errors import RefusedError
from node.membership_client import GroupVerdict, MembershipClient
from node.rollout import Completion, LogprobMode, PromptLease, RolloutGroup, Verdict
from node.rpc.channel import ConnectionLost
from node.until import run_until
from sampler.engines.base import Engine, FinishedRequest, GenerationRequest
from sampler.generation import Generation
from sampler.group_tally import GroupTally
from sampler.leasing import Leasing
from sampler.metrics import Dropped, SamplerMetrics
from sampler.tasks.base import Task, import_path, load_task
from sampler.tasks.grader import Grader, GradingError
from sampler.uploader import Uploader
from sampler.workload import Job, Stage, Workload

logger = logging.getLogger(__name__)


class Rollouts:
    """A service; ready once it knows its task."""

    name = "rollouts"

    def __init__(
        self,
        engine: Engine,
        *,
        run_id: str,
        membership: MembershipClient,
        generation: Generation,
        leasing: Leasing,
        uploader: Uploader,
        workload: Workload,
        custom_tasks: Mapping[str, str],
        make_grader: Callable[[str], Grader],
        flush_timeout_s: float,
        metrics: SamplerMetrics,
        clock: Clock,
    ) -> None:
        """Put the loop together.

        Args:
            custom_tasks: Task name -> import path, beside the built-in ones.
            make_grader: Makes the grader of a task from its import path.
            flush_timeout_s: How long a stopping sampler tries to hand in what is finished.
        """
        self._engine = engine
        self._run_id = run_id
        self._membership = membership
        self._generation = generation
        self._leasing = leasing
        self._uploader = uploader
        self._workload = workload
        self._custom_tasks = custom_tasks
        self._make_grader = make_grader
        self._flush_timeout_s = flush_timeout_s
        self._metrics = metrics
        self._clock = clock
        self._tally = GroupTally(now=clock.monotonic())

    def forget_lost(self, lease_ids: Iterable[str]) -> None:
        """Drop the work on leases the hub has given to others."""
        self._drop(self._workload.drop_generating(lease_ids), Dropped.LOST)

    def forget_doubtful(self) -> None:
        """Drop everything generating: the policy it is drawn from may be no version at all."""
        self._give_up(Dropped.DOUBTFUL)

    def note_verdict(self, verdict: GroupVerdict) -> None:
        """Count what the learner says of a group that was handed in."""
        self._metrics.groups.labels(verdict.verdict).inc()
        logger.debug(
            "verdict",
            extra={"group_id": verdict.group_id, "verdict": verdict.verdict, "detail": verdict.detail},
        )

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Sample until ``stopping``, then hand in what is finished.

        Raises:
            ConfigError: this sampler does not know the run's task.
        """
        settings = await self._membership.settings()
        path = import_path(settings.task, self._custom_tasks)
        task = await asyncio.to_thread(load_task, path)
        grader = self._make_grader(path)
        try:
            await self._sample(_Work(settings.task, task, grader), ready, stopping)
        finally:
            await grader.close()

    async def _sample(self, work: "_Work", ready: Callable[[], None], stopping: asyncio.Event) -> None:
        grading: set[asyncio.Task[None]] = set()

        def take(lease: PromptLease) -> bool:
            return self._take(lease, work)

        def grade(finished: FinishedRequest) -> None:
            job = self._workload.advance(finished.request_id, Stage.GRADING)
            self._leasing.notice_change()
            if job is not None:
                graded = tasks.create_task(self._grade(job, finished, work))
                grading.add(graded)
                graded.add_done_callback(grading.discard)

        async with asyncio.TaskGroup() as tasks:
            generating = tasks.create_task(self._generation.run(finished=grade, refused=self._refuse))
            uploading = tasks.create_task(self._uploader.run(self._settle))
            ready()
            await run_until(stopping, self._leasing.run(take))
            await self._finish(grading)
            generating.cancel()
            uploading.cancel()

    async def _finish(self, grading: set[asyncio.Task[None]]) -> None:
        self._give_up(Dropped.STOPPING)
        try:
            async with asyncio.timeout(self._flush_timeout_s):
                await self._give_back()
                if grading:
                    await asyncio.wait(grading)
                await self._uploader.flushed()
        except TimeoutError:
            logger.warning("finished groups not handed in", extra={"groups": len(self._workload)})
            self._metrics.dropped_groups.labels(Dropped.STOPPING).inc(len(self._workload))
            for task in grading:
                task.cancel()
        if (rest := self._tally.rest(now=self._clock.monotonic())) is not None:
            logger.info("groups handed in", extra=asdict(rest))

    async def _give_back(self) -> None:
        try:
            await self._leasing.give_back_now()
        except (ConnectionLost, RefusedError) as error:
            logger.warning("leases not given back, they will expire", extra={"detail": str(error)})

    def _take(self, lease: PromptLease, work: "_Work") -> bool:
        if lease.task != work.task_name or not 0 <= lease.prompt_index < work.task.prompts:
            logger.warning(
                "lease for another task",
                extra={"lease_id": lease.lease_id, "task": lease.task, "prompt_index": lease.prompt_index},
            )
            self._metrics.dropped_groups.labels(Dropped.REFUSED).inc()
            self._leasing.give_back([lease.lease_id])
            return False
        self._workload.take(lease, now=self._clock.now())
        prompt = self._engine.encode(work.task.prompt(lease.prompt_index))
        self._generation.add(GenerationRequest(lease.lease_id, prompt, lease.group_size, lease.sampling))
        return True

    def _refuse(self, lease_id: str, refused: RefusedError) -> None:
        logger.warning("prompt refused", extra={"lease_id": lease_id, "detail": str(refused)})
        self._abandon(lease_id, Dropped.REFUSED)

    async def _grade(self, job: Job, finished: FinishedRequest, work: "_Work") -> None:
        finished_at_s = self._clock.now()
        self._metrics.group_seconds.observe(finished_at_s - job.started_at_s)
        texts = [self._engine.decode(completion.token_ids) for completion in finished.completions]
        try:
            with self._metrics.grade_seconds.time():
                rewards = await work.grader.grade(job.lease.prompt_index, texts)
        except GradingError as error:
            logger.warning("group not graded", extra={"group_id": job.lease.lease_id, "detail": str(error)})
            self._abandon(job.lease.lease_id, Dropped.UNGRADED)
            return
        # One offset for all three stamps: their differences are this clock's alone.
        offset_s = self._membership.clock_offset_s
        group = RolloutGroup(
            run_id=self._run_id,
            group_id=job.lease.lease_id,
            layout_digest=self._engine.layout.digest,
            tokenizer_digest=self._engine.tokenizer_digest,
            task=job.lease.task,
            prompt_index=job.lease.prompt_index,
            prompt_token_ids=self._engine.encode(work.task.prompt(job.lease.prompt_index)),
            completions=_completions(finished, rewards),
            sampling=job.lease.sampling,
            logprob_mode=LogprobMode.SAMPLED,
            sampling_started_at_s=job.started_at_s + offset_s,
            sampling_finished_at_s=finished_at_s + offset_s,
            graded_at_s=self._clock.now() + offset_s,
        )
        self._metrics.tokens.inc(group.tokens)
        self._metrics.reward_mean.set(_reward_mean(group))
        self._workload.advance(group.group_id, Stage.OUTBOX)
        await self._uploader.put(group)

    def _settle(self, group: RolloutGroup, verdict: Verdict | None) -> None:
        self._workload.settle(group.group_id)
        self._leasing.notice_change()
        if verdict is None:
            self._metrics.dropped_groups.labels(Dropped.REFUSED).inc()
            return
        self._metrics.groups.labels(verdict).inc()
        told = self._tally.add(group, verdict, reward_mean=_reward_mean(group), now=self._clock.monotonic())
        if told is not None:
            logger.info("groups handed in", extra=asdict(told))
        logger.debug(
            "group",
            extra={
                "group_id": group.group_id,
                "prompt_index": group.prompt_index,
                "verdict": verdict,
                "reward_mean": round(_reward_mean(group), 4),
                "oldest_version": group.oldest_version,
                "newest_version": group.newest_version,
                "tokens": group.tokens,
                "sampled_s": round(group.sampling_finished_at_s - group.sampling_started_at_s, 3),
                "graded_s": round(group.graded_at_s - group.sampling_finished_at_s, 3),
            },
        )

    def _abandon(self, lease_id: str, reason: Dropped) -> None:
        self._workload.settle(lease_id)
        self._metrics.dropped_groups.labels(reason).inc()
        self._leasing.give_back([lease_id])

    def _give_up(self, reason: Dropped) -> None:
        dropped = self._workload.drop_generating()
        self._drop(dropped, reason)
        self._leasing.give_back(dropped)

    def _drop(self, lease_ids: Sequence[str], reason: Dropped) -> None:
        self._generation.cancel(lease_ids)
        self._metrics.dropped_groups.labels(reason).inc(len(lease_ids))
        self._leasing.notice_change()


@dataclass(frozen=True, slots=True)
class _Work:
    """What every lease of a run is about."""

    task_name: str
    task: Task
    grader: Grader


def _completions(finished: FinishedRequest, rewards: Iterable[float]) -> tuple[Completion, ...]:
    return tuple(
        Completion(
            token_ids=sampled.token_ids,
            behaviour_logprob=sampled.behaviour_logprob,
            policy_version=sampled.policy_version,
            reward=reward,
            is_finished=sampled.is_finished,
            kept_mass=sampled.kept_mass,
        )
        for sampled, reward in zip(finished.completions, rewards, strict=True)
    )


def _reward_mean(group: RolloutGroup) -> float:
    return sum(completion.reward for completion in group.completions) / len(group.completions)
