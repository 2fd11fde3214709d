"""A sampler of a simulated run: production's leasing, work queue, submitter and policy, without an engine."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from node.coordinator.fleet.peer_reports import HeartbeatReport
from node.errors import Reason, RefusedError
from node.rpc.call_ends import ConnectionLost
from node.system.backoff import Backoff
from node.values.groups.failure import FailedLease, Failure
from node.values.groups.rollout import Completion, EncodedGroup, Finish, LeaseGrant, PromptLease, RolloutGroup
from node.values.groups.verdict import Verdict
from node.values.policy import PolicyVersion
from node.values.roles import Role
from node.weights.planning.cheapest_chain import plan_catch_up, plan_fresh
from node.wire.rollouts import group_to_wire
from sampler.rollouts.group_submitter import GroupSubmitter
from sampler.rollouts.leasing import Leasing
from sampler.rollouts.work_queue import NOT_GENERATED, JobState, WorkQueue
from sampler.served_policy import Command, Event, ServedPolicy
from simulation.faults import Plan
from simulation.hub import LAYOUT, RUN_ID, TOKENIZER, Hub, announcement, peer_of, root_of
from simulation.hub_calls import HubCalls
from simulation.network import Network
from simulation.reached import NamedWaits
from simulation.virtual_loop import Clock, Process
from simulation.witness import Witness

CONCURRENCY_GROUPS = 2
UNSUBMITTED_GROUPS = 2
HEARTBEAT_S = 2.0
LOOK_S = 1.5
BYTES_PER_S = 2_000_000.0
FAULTS_MADE = (Failure.PROMPT_TOO_LONG, Failure.GRADING_FAILED, Failure.PROMPT_TIMED_OUT)

KeepGroup = Callable[[RolloutGroup], bytes]
"""Keeps a group where the learner finds it; returns the bytes that stand for it."""


class SimulatedSampler:
    """One life of a sampler; also the client that its leasing speaks through."""

    def __init__(
        self,
        plan: Plan,
        process: Process,
        *,
        network: Network,
        hub: Callable[[], Hub | None],
        keep: KeepGroup,
        draw: random.Random,
        clock: Clock,
        witness: Witness,
        reached: Counter[str],
    ) -> None:
        self.process = process
        self.name = process.name
        self.slowness = 1.0
        self.fails_prompts = False
        self.instance = f"{process.name}/{process.life}"
        self._plan = plan
        self._call = HubCalls(process, network, hub)
        self._keep = keep
        self._draw = draw
        self._clock = clock
        self._witness = witness
        self._reached = reached
        self._waits = NamedWaits(reached)
        self.peer = peer_of(process.name, Role.SAMPLER)
        self._queue = WorkQueue(concurrency_groups=CONCURRENCY_GROUPS, unsubmitted_groups=UNSUBMITTED_GROUPS)
        self.policy = ServedPolicy(is_generating=self._queue.is_generating_by)
        waits: Any = self._waits
        client: Any = self
        self.leasing = Leasing(
            client,
            self.policy,
            work_queue=self._queue,
            node_metrics=waits,
            random=draw.random,
            monotonic=process.loop.time,
        )
        self._submitter = GroupSubmitter(self._call_submit, random=draw.random)
        self._generating: dict[str, asyncio.Task[None]] = {}
        self._groups: dict[str, RolloutGroup] = {}
        """Groups that are submitted, and not settled."""

    @property
    def waits_for(self) -> str:
        return self._waits.waits_for

    def start(self) -> None:
        self.process.spawn(self._run())

    async def _run(self) -> None:
        self.policy.load(PolicyVersion(0, root_of(0)))
        self.policy.hold(PolicyVersion(0, root_of(0)), now=self.process.loop.time())
        await self._join()
        self.process.spawn(self._send_heartbeats())
        self.process.spawn(self._follow())
        try:
            await self.leasing.run(self._take)
        except RefusedError as refused:
            self._witness.violated(f"{self.name} is refused for good: {refused}")

    async def _join(self) -> None:
        backoff = Backoff(self._draw.random)
        while True:
            try:
                await self._call(
                    lambda hub: hub.join_sampler(
                        self.peer, self.policy.held, instance=self.instance, prompts=self._plan.prompts
                    )
                )
                return
            except (ConnectionLost, RefusedError):
                with self._waits.waiting("coordinator"):
                    await backoff.wait()

    # The client that leasing speaks through.

    async def lease(self, wanted: int, held: PolicyVersion, *, stays: bool) -> LeaseGrant:
        grant: LeaseGrant = await self._call(lambda hub: hub.lease(self.peer, wanted, held, stays=stays))
        self._witness.heard_grant(self.name, wanted, grant)
        return grant

    async def release(self, lease_ids: tuple[str, ...], failed: tuple[FailedLease, ...]) -> int:
        released: int = await self._call(lambda hub: hub.release(self.peer, lease_ids, failed))
        return released

    # Work on leases.

    def _take(self, lease: PromptLease) -> bool:
        self._queue.take(lease, now=self._clock.now())
        self.process.spawn(self._prepare(lease))
        return True

    async def _prepare(self, lease: PromptLease) -> None:
        await asyncio.sleep(0.05 * self._draw.random())
        prompt: Any = None
        self._queue.make_ready(lease.lease_id, prompt, now=self._clock.now())
        self._begin_ready()

    def _begin_ready(self) -> None:
        while (job := self._queue.begin_next(now=self._clock.now())) is not None:
            name = job.lease.lease_id
            self._generating[name] = self.process.spawn(self._generate(job.lease))
        self.leasing.notice_change()

    async def _generate(self, lease: PromptLease) -> None:
        name, began_at_s, oldest = lease.lease_id, self._clock.now(), self.policy.held.number
        try:
            await asyncio.sleep(self._plan.group_s * self.slowness * self._draw.uniform(0.3, 2.0))
            if self.fails_prompts:
                if self._queue.settle(name) is not None:
                    self.leasing.give_up(name, self._draw.choice(FAULTS_MADE), "it fails here")
                return
        finally:
            self._generating.pop(name, None)
        if self._queue.finish(name, now=self._clock.now()) is None:
            return
        self.leasing.note_success()
        group = make_group(lease, oldest, self.policy.held.number, at_s=(began_at_s, self._clock.now()))
        header = b"header"
        if self._plan.verifiers_grade:
            group = ungraded(group)
            header = group_to_wire(group).header
        self._groups[name] = group
        self._queue.advance(name, JobState.SUBMITTING)
        self._begin_ready()
        await self._submitter.verdict(EncodedGroup(header, self._keep(group), name, self.name))
        self._queue.settle(name)
        self._groups.pop(name, None)
        self.leasing.notice_change()

    def lost(self, lease_ids: tuple[str, ...]) -> None:
        """Drop what was given to others and is not generated."""
        for name in self._queue.drop(NOT_GENERATED, lease_ids):
            self._reached["lease given to another meanwhile"] += 1
            if (task := self._generating.pop(name, None)) is not None:
                task.cancel()
        self._begin_ready()

    async def _call_submit(self, encoded: EncodedGroup) -> tuple[Verdict, str]:
        group = self._groups[encoded.group_id]
        submitted = await self._call(lambda hub: hub.submit(encoded, group))
        self._witness.told(self.name, encoded.group_id, submitted.verdict)
        return submitted.verdict, submitted.detail

    # Versions and heartbeats.

    async def _send_heartbeats(self) -> None:
        has_heard = False
        while True:
            report = HeartbeatReport(
                self.policy.held, waits_for=self.waits_for, has_heard=has_heard, instance=self.instance
            )
            running = self._queue.lease_ids
            try:
                answer, lost = await self._call(
                    lambda hub: hub.heartbeat(self.peer, report, running)  # noqa: B023 - awaited
                )
            except ConnectionLost:
                has_heard = False
            except RefusedError as refused:
                has_heard = False
                if refused.reason is Reason.NOT_JOINED:
                    await self._join()
                    continue
            else:
                has_heard = True
                self._witness.heard_head(self.name, answer.head)
                self.lost(lost)
            await asyncio.sleep(HEARTBEAT_S)

    async def _follow(self) -> None:
        """Go to the head by the cheapest chain, as long as nothing holds the sampler back."""
        while True:
            await asyncio.sleep(LOOK_S * self._draw.uniform(0.5, 1.5))
            now = self.process.loop.time()
            if self.policy.command(now=now) is not Command.LOOK:
                continue
            try:
                announced = await self._call(announcement)
            except (ConnectionLost, RefusedError):
                continue
            if announced is None or announced.head.number <= self.policy.held.number:
                continue
            held, head = self.policy.held.number, announced.head
            chain = plan_catch_up(held, head.number, announced.artifacts, artifact_cost_bytes=50_000)
            if chain is None:
                chain = plan_fresh(head.number, announced.artifacts)
            if chain is None:
                self._witness.violated(f"no chain leads from version {held} to the head {head.number}")
                return
            self.policy.note(Event.FETCH)
            await asyncio.sleep(sum(one.size_bytes for one in chain) / BYTES_PER_S * self.slowness)
            self.policy.note(Event.VERIFIED)
            while self.policy.command(now=self.process.loop.time()) is Command.STAY:  # noqa: ASYNC110
                await asyncio.sleep(0.5)
            self._witness.held(self.name, self.instance, head.number)
            self.policy.hold(head, now=self.process.loop.time())


def make_group(
    lease: PromptLease,
    oldest: int,
    newest: int,
    *,
    at_s: tuple[float, float],
) -> RolloutGroup:
    """Return a group that a sampler might send, its tokens drawn by two versions."""
    versions = np.array([oldest, oldest, newest], np.int32)
    completion = Completion(
        token_ids=_TOKENS,
        behaviour_logprob=_LOGPROBS,
        policy_version=versions,
        reward=0.0,
        finish=Finish.END,
    )
    other = Completion(
        token_ids=_TOKENS,
        behaviour_logprob=_LOGPROBS,
        policy_version=versions,
        reward=1.0,
        finish=Finish.END,
    )
    return RolloutGroup(
        run_id=RUN_ID,
        group_id=lease.lease_id,
        layout_digest=LAYOUT,
        tokenizer_digest=TOKENIZER,
        task=lease.task,
        prompt_index=lease.prompt_index,
        prompt_token_ids=_PROMPT,
        completions=(completion, other),
        sampling=lease.sampling,
        sampling_started_at_s=min(at_s),
        sampling_finished_at_s=max(at_s),
        graded_at_s=max(at_s),
        task_digest=lease.task_digest,
    )


def ungraded(group: RolloutGroup) -> RolloutGroup:
    return replace(group, completions=tuple(replace(one, reward=math.nan) for one in group.completions))


_TOKENS = np.array([5, 6, 7], np.int32)
_LOGPROBS = np.full(3, -0.5, np.float32)
_PROMPT = np.array([1, 2, 3], np.int32)
