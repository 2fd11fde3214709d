"""The coordinator's answers about rollouts: translates between the wire, ``PeerRequests`` and the spool."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeVar

from heterorl.v1 import orders_pb2, rollout_pb2
from node.coordinator.drain_stream import DrainStream
from node.coordinator.peer_requests import PeerRequests
from node.coordinator.reward_checking import RewardChecking, Verifier
from node.coordinator.spool import OrdersTold, Quarantines, Spool
from node.coordinator.work.slots import is_held_out
from node.coordinator.work.step_history import Hello
from node.coordinator.work.verifier_places import GRADING_LIMIT_S
from node.errors import Reason, RefusedError
from node.failure import FailedLease, detail_of
from node.identity.peer import Peer, is_name
from node.limits import TRAINED_RUNS
from node.operator_order import OrderAnswer
from node.policy import PolicyVersion
from node.rollout import EncodedGroup, GroupHeader, RolloutGroup
from node.run import StepRecord
from node.telemetry.transfer_metrics import TransferMetrics
from node.verdict import GroupVerdict, Verdict
from node.waits import put_away, side_by_side
from node.wire.mapping import from_wire, optional_from_wire, to_wire
from node.wire.rollouts import delivery_to_wire, finding_from_wire, group_from_wire, header_from_wire

HELLO_TIMEOUT_S: Final = 15.0
"""A learner that has not sent its hello by then hangs."""

MESSAGES_IN_FLIGHT: Final = 64
"""A learner's messages that may wait for the ledger: it judges as many groups a second as come in."""

_DETAIL_CHARACTERS: Final = 1000

_Request = TypeVar("_Request", rollout_pb2.DrainRolloutsRequest, rollout_pb2.CheckRewardsRequest)

HELD_GROUPS: Final = 65_536
"""Groups a learner may hold: the largest buffer there is."""


@dataclass(eq=False)
class RunRollouts:
    """Leases prompts, takes groups in, and delivers them to the learner."""

    requests: PeerRequests
    spool: Spool
    checking: RewardChecking
    group_bytes: int
    """Size of the largest group of the run."""
    metrics: TransferMetrics

    async def lease(
        self, peer: Peer, request: rollout_pb2.LeasePromptsRequest
    ) -> rollout_pb2.LeasePromptsResponse:
        held = optional_from_wire(PolicyVersion, request, "held")
        grant = await self.requests.lease(peer, request.max_leases, held, stays=request.stays)
        return to_wire(rollout_pb2.LeasePromptsResponse, grant)

    async def release(
        self, peer: Peer, request: rollout_pb2.ReleaseLeasesRequest
    ) -> rollout_pb2.ReleaseLeasesResponse:
        failed = tuple(from_wire(FailedLease, one, detail=detail_of(one.detail)) for one in request.failed)
        released = await self.requests.release(peer, tuple(request.lease_ids), failed)
        return rollout_pb2.ReleaseLeasesResponse(released=released)

    async def take(self, group: EncodedGroup) -> tuple[Verdict, str]:
        submitted = await self.requests.submit(group, _read(group))
        return submitted.verdict, submitted.detail

    async def drain(
        self, peer: Peer, requests: AsyncIterator[rollout_pb2.DrainRolloutsRequest]
    ) -> AsyncGenerator[rollout_pb2.DrainRolloutsResponse]:
        """Send groups and acknowledgements while a second task listens to the learner."""
        drain = await self._open(peer.node_id, (await _first(requests)).hello)
        listener = asyncio.create_task(self._listen(requests, drain))
        listener.add_done_callback(lambda _: drain.end())
        try:
            async for outgoing in self.spool.deliver(drain):
                if isinstance(outgoing, EncodedGroup):
                    self.metrics.count_rollouts(sent_bytes=outgoing.size_bytes)
                yield _response(outgoing)
        finally:
            drain.end()
            await put_away(listener)
        if not listener.cancelled():
            listener.result()

    async def check_rewards(
        self, peer: Peer, requests: AsyncIterator[rollout_pb2.CheckRewardsRequest]
    ) -> AsyncGenerator[rollout_pb2.CheckRewardsResponse]:
        """Send groups to a verifier while a second task takes the findings."""
        hello = (await _first(requests)).hello
        self.requests.peers.check_present(peer)
        self.requests.check_model(peer)
        if objection := self.requests.peers.objection_to_grader(peer):
            raise RefusedError(Reason.BUSY, objection, fix="install the run's grader at the verifier")
        verifier = self.checking.admit(
            peer.node_id,
            task_digest=hello.task_digest,
            groups=hello.groups,
            noise_ratio=hello.noise_ratio,
            grades_at_once=hello.grades_at_once,
            grading_limit_s=hello.grading_limit_s or GRADING_LIMIT_S,
        )
        listener = asyncio.create_task(self._take_findings(requests, verifier))
        listener.add_done_callback(lambda _: self.checking.dismiss(verifier))
        try:
            async for group, row in self.checking.groups(verifier):
                self.requests.check_model(peer)  # the learner may have come since
                yield rollout_pb2.CheckRewardsResponse(group=delivery_to_wire(group).group, row=row)
        finally:
            await put_away(listener)
        if not listener.cancelled():
            listener.result()

    async def _take_findings(
        self, requests: AsyncIterator[rollout_pb2.CheckRewardsRequest], verifier: Verifier
    ) -> None:
        async for request in requests:
            await self.checking.note(verifier, finding_from_wire(request.finding))

    async def _open(self, node_id: str, hello: rollout_pb2.DrainHello) -> DrainStream:
        if len(hello.held_group_ids) > HELD_GROUPS:
            raise RefusedError(
                Reason.OVER_LIMIT,
                f"a learner that holds {len(hello.held_group_ids)} groups, at most {HELD_GROUPS} are allowed",
            )
        return await self.spool.open_drain(
            Hello(
                node_id,
                hello.learner_epoch,
                hello.version,
                records=tuple(from_wire(StepRecord, step) for step in hello.steps),
                held_group_ids=tuple(hello.held_group_ids),
                trained_slots=_runs(hello.trained_slots),
            )
        )

    async def _listen(
        self, requests: AsyncIterator[rollout_pb2.DrainRolloutsRequest], drain: DrainStream
    ) -> None:
        """Take what the learner says in its order; what it says meanwhile shares the next commit."""
        places = asyncio.Semaphore(MESSAGES_IN_FLIGHT)
        async with side_by_side() as tasks:
            async for request in requests:
                if drain.is_ended:
                    return
                await places.acquire()
                tasks.create_task(self._hear(request, drain)).add_done_callback(lambda _: places.release())

    async def _hear(self, request: rollout_pb2.DrainRolloutsRequest, drain: DrainStream) -> None:
        match request.WhichOneof("message"):
            case "credit":
                drain.add_credits(request.credit.groups)
            case "judgement":
                detail = request.judgement.detail[:_DETAIL_CHARACTERS]
                judged = from_wire(GroupVerdict, request.judgement, detail=detail)
                await self.spool.judge(drain, judged)
            case "step":
                await self.spool.record_step(drain, from_wire(StepRecord, request.step))
            case "quarantine":
                told = request.quarantine
                if not is_name(told.sampler_id):
                    raise RefusedError(
                        Reason.MALFORMED, f"{told.sampler_id[:100]!r} is not the node id of a sampler"
                    )
                await self.spool.quarantine(told.sampler_id, detail_of(told.reason))
            case "order_answer":
                answer = detail_of(request.order_answer.answer) or "done"
                answered = from_wire(OrderAnswer, request.order_answer, answer=answer)
                await self.spool.note_answer(drain, answered)
            case other:
                raise RefusedError(Reason.MALFORMED, f"a message with {other or 'nothing'} after the hello")


def _runs(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return runs of slots. Raises RefusedError: MALFORMED; they are not runs in ascending order."""
    runs = tuple(zip(numbers[::2], numbers[1::2], strict=False))
    is_ascending = all(before <= after for before, after in pairwise(numbers))
    if len(numbers) % 2 or len(runs) > TRAINED_RUNS or not is_ascending or (runs and runs[0][0] < 0):
        raise RefusedError(
            Reason.MALFORMED, f"{len(numbers)} numbers are not runs of slots in ascending order"
        )
    return runs


def _read(group: EncodedGroup) -> GroupHeader | RolloutGroup | RefusedError:
    """Read the header of a group for training, and all of one for evaluation, which goes no further."""
    read: GroupHeader | RolloutGroup
    try:
        read = group_from_wire(group) if is_held_out(group.group_id) else header_from_wire(group.header)
    except RefusedError as refused:
        return refused
    if read.group_id != group.group_id:
        return RefusedError(
            Reason.MALFORMED, f"group {read.group_id[:100]!r} was submitted as {group.group_id[:100]!r}"
        )
    return read


async def _first(requests: AsyncIterator[_Request]) -> _Request:
    first = None
    with contextlib.suppress(TimeoutError, StopAsyncIteration):
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            first = await anext(requests)
    if first is None or not first.HasField("hello"):
        raise RefusedError(Reason.MALFORMED, "the stream does not begin with a hello")
    return first


def _response(outgoing: EncodedGroup | int | Quarantines | OrdersTold) -> rollout_pb2.DrainRolloutsResponse:
    if isinstance(outgoing, Quarantines):
        quarantines = rollout_pb2.Quarantines(releases_others=outgoing.releases_others)
        for one in outgoing.samplers:
            quarantines.samplers.add(sampler_id=one.sampler_id, reason=one.quarantine)
        return rollout_pb2.DrainRolloutsResponse(quarantines=quarantines)
    if isinstance(outgoing, tuple):
        told = rollout_pb2.LearnerOrders(orders=[to_wire(orders_pb2.Order, order) for order in outgoing])
        return rollout_pb2.DrainRolloutsResponse(orders=told)
    if isinstance(outgoing, int):
        acknowledged = rollout_pb2.StepAcknowledged(version=outgoing)
        return rollout_pb2.DrainRolloutsResponse(step_acknowledged=acknowledged)
    return delivery_to_wire(outgoing)
