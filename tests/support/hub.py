"""A whole coordinator on free ports, with real TLS and a real ledger, and peers driven by hand."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import grpc.aio
from prometheus_client import CollectorRegistry

from bench.role_on_wire import role_to_wire
from heterorl.v1 import (
    common_pb2,
    membership_pb2,
    membership_pb2_grpc,
    policy_pb2,
    policy_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
)
from node.coordinator.config import CoordinatorConfig
from node.coordinator.coordinator_role import build
from node.coordinator.lifecycle.coordinator_service import CoordinatorService
from node.identity.identity_store import Identity
from node.rpc.channel import Purpose, dial
from node.values.groups.rollout import EncodedGroup, RolloutGroup
from node.values.groups.sampling_parameters import SamplingParameters
from node.values.protocol import OURS
from node.values.roles import Role
from node.wire.mapping import from_wire
from node.wire.rollouts import encoded_from_wire, group_from_wire, group_to_wire, submission_to_wire
from support.clock import ManualClock
from support.groups import SAMPLING, make_group
from support.identity import MadeRun
from support.roles import role_context
from support.waiting import WITHIN_S, until

TIMEOUT_S = WITHIN_S
"""Deadline of a call, and of a stream for as long as a test uses it."""
LAYOUT, TOKENIZER = b"l" * 16, b"t" * 16
LEASE_TTL_S = 60.0

DrainCall: TypeAlias = (
    "grpc.aio.StreamStreamCall[rollout_pb2.DrainRolloutsRequest, rollout_pb2.DrainRolloutsResponse]"
)


@dataclass(slots=True)
class RunningHub:
    """A coordinator that serves."""

    made: MadeRun
    hub: CoordinatorService
    registry: CollectorRegistry
    clock: ManualClock
    stopping: asyncio.Event
    running: "asyncio.Task[None]"

    @property
    def address(self) -> str:
        return self.hub.address

    def metric(self, name: str, **labels: str) -> float:
        """Return one number of the registry; 0 where it is not there."""
        return self.registry.get_sample_value(name, labels) or 0.0

    async def has_heard_learner(self) -> None:
        """Wait until the learner's hello has been read; before, a ledger that was found leases nothing."""
        await until(lambda: self.hub.accounts.is_confirmed)

    @asynccontextmanager
    async def peer(self, identity: Identity | None = None) -> "AsyncIterator[HandPeer]":
        """Connect as somebody; None: the learner."""
        caller = identity or self.made.learner
        async with dial(self.address, caller, purpose=Purpose.ROLLOUTS, now=time.time()) as channel:
            yield HandPeer(caller, channel)


@asynccontextmanager
async def running_hub(made: MadeRun, **settings: Any) -> AsyncIterator[RunningHub]:
    """Run a coordinator until the body ends; the next one of the same ``made`` finds what it left."""
    clock = ManualClock(time.time())
    values = {
        "task": "addition",
        "prompts": 100,
        "group_size": 2,
        "batch_groups": 2,
        "max_staleness_versions": 2,
        "max_new_tokens": SAMPLING.max_new_tokens,
        "heartbeat_interval_s": 0.05,
        "lease_ttl_s": LEASE_TTL_S,
        "listen": "127.0.0.1:0",
        "enrolment_listen": "127.0.0.1:0",
    }
    section = CoordinatorConfig.model_validate(values | settings)
    context = role_context(made, Role.COORDINATOR, section, clock=clock, drain_timeout_s=2.0)
    (hub,) = await build(context)
    assert isinstance(hub, CoordinatorService)
    ready, stopping = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(hub.run(ready=ready.set, stopping=stopping))
        await ready.wait()
        try:
            yield RunningHub(made, hub, context.registry, clock, stopping, running)
        finally:
            stopping.set()


@asynccontextmanager
async def members(hub: RunningHub, *samplers: Identity) -> "AsyncIterator[tuple[HandPeer, ...]]":
    """Join as the learner and as samplers, one unless they are named."""
    async with AsyncExitStack() as stack:
        identities = (hub.made.learner, *(samplers or (hub.made.sampler,)))
        peers = [await stack.enter_async_context(hub.peer(identity)) for identity in identities]
        for peer in peers:
            await peer.join()
        yield tuple(peers)


@asynccontextmanager
async def joined(made: MadeRun, *samplers: Identity, **settings: Any) -> AsyncIterator[tuple[Any, ...]]:
    """Run a coordinator that the learner and samplers have joined."""
    async with running_hub(made, **settings) as hub, members(hub, *samplers) as peers:
        yield hub, *peers


@dataclass(slots=True)
class HandPeer:
    """A peer that does only what a test tells it to."""

    identity: Identity
    channel: grpc.aio.Channel
    held: common_pb2.PolicyVersion = field(default_factory=common_pb2.PolicyVersion)

    @property
    def membership(self) -> "membership_pb2_grpc.MembershipServiceAsyncStub":
        return membership_pb2_grpc.MembershipServiceStub(self.channel)

    @property
    def rollout(self) -> "rollout_pb2_grpc.RolloutServiceAsyncStub":
        return rollout_pb2_grpc.RolloutServiceStub(self.channel)

    async def join(self, **changes: Any) -> membership_pb2.JoinResponse:
        is_learner = self.identity.role is Role.LEARNER
        has_model = self.identity.role in (Role.LEARNER, Role.SAMPLER)
        values: dict[str, Any] = {
            "run_id": self.identity.run_id,
            "role": role_to_wire(self.identity.role),
            "layout_digest": LAYOUT if has_model else b"",
            "tokenizer_digest": b"" if self.identity.role is Role.RELAY else TOKENIZER,
            "learner_epoch": 1 if is_learner else 0,
            "vocabulary_size": 100 if is_learner else 0,
            "held": self.held,
            **asdict(OURS),
        }
        return await self.membership.Join(membership_pb2.JoinRequest(**(values | changes)), timeout=TIMEOUT_S)

    async def heartbeat(self, *leases: str, **changes: Any) -> membership_pb2.HeartbeatResponse:
        """Send one heartbeat, on a stream of its own that is then cut rather than ended."""
        values: dict[str, Any] = {"sequence": 1, "held": self.held, "running_lease_ids": leases}
        request = membership_pb2.HeartbeatRequest(**(values | changes))
        stream = self.membership.Heartbeat(timeout=TIMEOUT_S)
        await stream.write(request)
        response = await stream.read()
        stream.cancel()
        assert isinstance(response, membership_pb2.HeartbeatResponse)
        return response

    async def lease(self, wanted: int = 1) -> rollout_pb2.LeasePromptsResponse:
        request = rollout_pb2.LeasePromptsRequest(max_leases=wanted, held=self.held, stays=True)
        return await self.rollout.LeasePrompts(request, timeout=TIMEOUT_S)

    async def submit(self, lease: rollout_pb2.PromptLease, **changes: Any) -> rollout_pb2.SubmissionAnswer:
        group = answer_to(lease, run_id=self.identity.run_id, **changes)
        return await self.hand_in(submission(group))

    async def hand_in(self, request: rollout_pb2.SubmitRolloutsRequest) -> rollout_pb2.SubmissionAnswer:
        """Submit on a stream of its own, and return the one answer."""
        stream = self.rollout.SubmitRollouts(timeout=TIMEOUT_S)
        await stream.write(request)
        await stream.done_writing()
        responses = [response async for response in stream]
        (answer,) = (answer for response in responses for answer in response.answers)
        return answer

    async def status(self) -> membership_pb2.GetStatusResponse:
        return await self.membership.GetStatus(membership_pb2.GetStatusRequest(), timeout=TIMEOUT_S)

    async def groups(self, number: int) -> list[RolloutGroup]:
        """Wait for so many groups on a new stream."""
        drain = await self.drain(credits=number)
        found: list[RolloutGroup] = []
        while len(found) < number:
            response = await drain.hear()
            if response.WhichOneof("message") == "group":
                found.append(group_from_wire(encoded_from_wire(response.group)))
        return found

    async def drain(self, *, credits: int = 0, **hello: Any) -> "HandDrain":
        """Open a drain stream; the hello is of epoch 1 and version 0 unless told otherwise."""
        drain = HandDrain(self.rollout.DrainRollouts(timeout=TIMEOUT_S))
        await drain.say(hello=rollout_pb2.DrainHello(**({"learner_epoch": 1} | hello)))
        if credits:
            await drain.say(credit=rollout_pb2.DrainCredit(groups=credits))
        return drain

    async def publish(self, signed: bytes, payloads: Sequence[bytes]) -> None:
        """Upload an artifact of one chunk per frame."""
        stub: policy_pb2_grpc.PolicyServiceAsyncStub = policy_pb2_grpc.PolicyServiceStub(self.channel)
        offer = await stub.OfferArtifact(
            policy_pb2.OfferArtifactRequest(signed_manifest=signed), timeout=TIMEOUT_S
        )
        stream = stub.UploadFrames(timeout=TIMEOUT_S)
        for frame in offer.missing_frames:
            await stream.write(
                policy_pb2.UploadFramesRequest(
                    key=policy_pb2.ArtifactKey(version=1, base_version=-1), frame=frame, data=payloads[frame]
                )
            )
        await stream.done_writing()
        assert list((await stream).missing_frames) == []


class HandDrain:
    """The learner's side of one drain stream."""

    def __init__(self, stream: DrainCall) -> None:
        self.stream = stream

    async def say(self, **message: Any) -> None:
        await self.stream.write(rollout_pb2.DrainRolloutsRequest(**message))

    async def judge(self, group_id: str, verdict: common_pb2.Verdict.ValueType) -> None:
        await self.say(judgement=rollout_pb2.GroupJudgement(group_id=group_id, verdict=verdict))

    async def step(self, version: int, *group_ids: str) -> None:
        await self.say(step=step_record(version, *group_ids))

    async def hear(self) -> rollout_pb2.DrainRolloutsResponse:
        response = await self.stream.read()
        assert isinstance(response, rollout_pb2.DrainRolloutsResponse), response
        return response

    async def group(self) -> str:
        """Wait for a group and give its id."""
        response = await self.hear()
        assert response.WhichOneof("message") == "group", response
        return response.group.group_id

    async def acknowledgement(self) -> int:
        """Wait for an acknowledgement and give its version."""
        response = await self.hear()
        assert response.WhichOneof("message") == "step_acknowledged", response
        return response.step_acknowledged.version

    async def hears_nothing(self, *, for_s: float = 0.3) -> bool:
        """Say whether nothing comes for a while. The stream cannot be read again afterwards."""
        reading = asyncio.ensure_future(self.stream.read())
        done, _ = await asyncio.wait({reading}, timeout=for_s)
        reading.cancel()
        return not done


def submission(
    group: RolloutGroup | EncodedGroup, /, *, group_id: str = "", **changes: Any
) -> rollout_pb2.SubmitRolloutsRequest:
    """Return the submission of a group, or of the bytes that pass for one, with any one thing changed."""
    encoded = group_to_wire(group) if isinstance(group, RolloutGroup) else group
    return submission_to_wire(replace(encoded, group_id=group_id or encoded.group_id, **changes))


async def first_answer(rpc: Callable[[], object], request: object) -> object:
    """Send one request on a new stream and return the answer."""
    stream = rpc()
    await stream.write(request)  # type: ignore[attr-defined]
    return await stream.read()  # type: ignore[attr-defined]


def step_record(version: int, *group_ids: str) -> rollout_pb2.StepRecord:
    """Return the record of a step that found its groups one version stale."""
    return rollout_pb2.StepRecord(
        version=version, group_ids=group_ids, staleness_versions=[1] * len(group_ids)
    )


def answer_to(lease: rollout_pb2.PromptLease, *, run_id: str, **changes: Any) -> RolloutGroup:
    """Return a good group for a lease, with any one thing changed."""
    values: dict[str, Any] = {
        "run_id": run_id,
        "task": lease.task,
        "prompt_index": lease.prompt_index,
        "sampling": from_wire(SamplingParameters, lease.sampling),
        "layout_digest": LAYOUT,
        "tokenizer_digest": TOKENIZER,
    }
    return make_group(
        lease.lease_id, size=lease.group_size, **({"task_digest": lease.task_digest} | values | changes)
    )
