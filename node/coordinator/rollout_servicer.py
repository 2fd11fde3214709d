"""RolloutService at the coordinator: translates between the wire and the spool."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, TypeVar

from heterorl.v1 import rollout_pb2, rollout_pb2_grpc
from node.coordinator.drain_stream import DrainStream
from node.coordinator.peers import Peers
from node.coordinator.reward_checking import RewardChecking, Verifier
from node.coordinator.spool import Quarantines, Spool
from node.coordinator.work.decisions import EMPTY_PAUSE_S
from node.coordinator.work.evaluation.evaluations import is_evaluation_lease
from node.coordinator.work.history import Hello
from node.coordinator.work.verdicts import Submitted
from node.errors import Reason, RefusedError
from node.failure import FailedLease, detail_of
from node.identity.peer import is_name
from node.identity.revocation import RevocationList
from node.limits import LEASES_PER_PEER, LEASES_PER_REQUEST
from node.policy import PolicyVersion
from node.rollout import (
    EncodedGroup,
    GroupHeader,
    GroupVerdict,
    LeaseGrant,
    RewardFinding,
    RolloutGroup,
    Verdict,
)
from node.rpc.auth import Context, peer_of
from node.run import Role, StepRecord
from node.serving.submissions import SubmissionDoor
from node.telemetry.transfer_metrics import TransferMetrics
from node.waits import side_by_side
from node.wire.mapping import from_wire, optional_from_wire, to_wire
from node.wire.rollouts import delivery_to_wire, group_from_wire, header_from_wire

HELLO_TIMEOUT_S: Final = 15.0
"""A learner that has not sent its hello by then hangs."""

MESSAGES_IN_FLIGHT: Final = 64
"""A learner's messages that may wait for the ledger: it judges as many groups a second as come in."""

_DETAIL_CHARACTERS: Final = 1000

_Request = TypeVar("_Request", rollout_pb2.DrainRolloutsRequest, rollout_pb2.CheckRewardsRequest)

HELD_GROUPS: Final = 65_536
"""Groups a learner may hold: the largest buffer there is."""


@dataclass(eq=False)
class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Leases prompts, takes groups in, and delivers them to the learner."""

    spool: Spool
    peers: Peers
    checking: RewardChecking
    door: SubmissionDoor
    group_bytes: int
    """Size of the largest group of the run."""
    revocations: RevocationList
    metrics: TransferMetrics

    async def LeasePrompts(  # noqa: N802 - the rpc's name
        self, request: rollout_pb2.LeasePromptsRequest, context: Context
    ) -> rollout_pb2.LeasePromptsResponse:
        peer = peer_of(context)
        self.peers.check_present(peer)
        if not 1 <= request.max_leases <= LEASES_PER_REQUEST:
            raise RefusedError(
                Reason.MALFORMED, f"max_leases = {request.max_leases}, allowed are 1 to {LEASES_PER_REQUEST}"
            )
        if self.peers.objection_to_grader(peer):
            return to_wire(rollout_pb2.LeasePromptsResponse, LeaseGrant((), EMPTY_PAUSE_S, "grader"))
        held = optional_from_wire(PolicyVersion, request, "held")
        grant = await self.spool.lease(peer.node_id, request.max_leases, held, stays=request.stays)
        return to_wire(rollout_pb2.LeasePromptsResponse, grant)

    async def ReleaseLeases(  # noqa: N802 - the rpc's name
        self, request: rollout_pb2.ReleaseLeasesRequest, context: Context
    ) -> rollout_pb2.ReleaseLeasesResponse:
        """Accept returned leases, and count the attempts that failed."""
        named = len(request.lease_ids) + len(request.failed)
        if named > LEASES_PER_PEER:
            raise RefusedError(
                Reason.OVER_LIMIT, f"{named} leases to release, at most {LEASES_PER_PEER} are allowed"
            )
        released = await self.spool.release(
            peer_of(context).node_id,
            tuple(request.lease_ids),
            tuple(from_wire(FailedLease, one, detail=detail_of(one.detail)) for one in request.failed),
        )
        return rollout_pb2.ReleaseLeasesResponse(released=released)

    async def SubmitRollouts(  # noqa: N802 - the rpc's name
        self,
        request_iterator: AsyncIterator[rollout_pb2.SubmitRolloutsRequest | RefusedError],
        context: Context,
    ) -> AsyncIterator[rollout_pb2.SubmitRolloutsResponse]:
        """Accept groups; one that breaks a rule has a verdict, not an error."""
        peer = peer_of(context)

        async def take(group: EncodedGroup) -> tuple[Verdict, str]:
            submitted = await self._take(group)
            if peer.role is Role.RELAY and submitted.verdict not in (Verdict.SPOOLED, Verdict.DUPLICATE):
                # The relay has told the sampler that the group is spooled.
                verdict = GroupVerdict(group.group_id[:100], submitted.verdict, submitted.detail)
                self.peers.notify(group.sampler_id, verdict)
            return submitted.verdict, submitted.detail

        async with aclosing(
            self.door.answers(request_iterator, peer, take, group_bytes=self.group_bytes)
        ) as responses:
            async for response in responses:
                yield response

    async def _take(self, group: EncodedGroup) -> Submitted:
        if self.revocations.is_revoked(group.sampler_id):  # since a relay took the group in
            return Submitted(Verdict.FOREIGN, f"{group.sampler_id} was revoked")
        return await self.spool.submit(group, _read(group))

    async def DrainRollouts(  # noqa: N802 - the rpc's name
        self, request_iterator: AsyncIterator[rollout_pb2.DrainRolloutsRequest], context: Context
    ) -> AsyncIterator[rollout_pb2.DrainRolloutsResponse]:
        """Send groups and acknowledgements while a second task listens to the learner."""
        drain = await self._open(peer_of(context).node_id, (await _first(request_iterator)).hello)
        listener = asyncio.create_task(self._listen(request_iterator, drain))
        listener.add_done_callback(lambda _: drain.end())
        try:
            async for outgoing in self.spool.deliver(drain):
                if isinstance(outgoing, EncodedGroup):
                    self.metrics.count_rollouts(sent_bytes=outgoing.size_bytes)
                yield _response(outgoing)
        finally:
            drain.end()
            listener.cancel()
            await asyncio.wait({listener})
        if not listener.cancelled():
            listener.result()

    async def CheckRewards(  # noqa: N802 - the rpc's name
        self, request_iterator: AsyncIterator[rollout_pb2.CheckRewardsRequest], context: Context
    ) -> AsyncIterator[rollout_pb2.CheckRewardsResponse]:
        """Send groups while a second task takes the findings."""
        peer, first = peer_of(context), await _first(request_iterator)
        self.peers.check_present(peer)
        hello = first.hello
        verifier = self.checking.admit(
            peer.node_id,
            task_digest=hello.task_digest,
            groups=hello.groups,
            noise_ratio=hello.noise_ratio,
        )
        listener = asyncio.create_task(self._take_findings(request_iterator, verifier))
        listener.add_done_callback(lambda _: self.checking.dismiss(verifier))
        try:
            async for group, row in self.checking.groups(verifier):
                yield rollout_pb2.CheckRewardsResponse(group=delivery_to_wire(group).group, row=row)
        finally:
            listener.cancel()
            await asyncio.wait({listener})
        if not listener.cancelled():
            listener.result()

    async def _take_findings(
        self, requests: AsyncIterator[rollout_pb2.CheckRewardsRequest], verifier: Verifier
    ) -> None:
        async for request in requests:
            detail = detail_of(request.finding.detail)
            await self.checking.note(verifier, from_wire(RewardFinding, request.finding, detail=detail))

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
            case other:
                raise RefusedError(Reason.MALFORMED, f"a message with {other or 'nothing'} after the hello")


def _read(group: EncodedGroup) -> GroupHeader | RolloutGroup | RefusedError:
    """Read the header of a group for training, and all of one for evaluation, which goes no further."""
    read: GroupHeader | RolloutGroup
    try:
        read = (
            group_from_wire(group) if is_evaluation_lease(group.group_id) else header_from_wire(group.header)
        )
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


def _response(outgoing: EncodedGroup | int | Quarantines) -> rollout_pb2.DrainRolloutsResponse:
    if isinstance(outgoing, Quarantines):
        quarantines = rollout_pb2.Quarantines(releases_others=outgoing.releases_others)
        for one in outgoing.samplers:
            quarantines.samplers.add(sampler_id=one.sampler_id, reason=one.quarantine)
        return rollout_pb2.DrainRolloutsResponse(quarantines=quarantines)
    if isinstance(outgoing, int):
        acknowledged = rollout_pb2.StepAcknowledged(version=outgoing)
        return rollout_pb2.DrainRolloutsResponse(step_acknowledged=acknowledged)
    return delivery_to_wire(outgoing)
