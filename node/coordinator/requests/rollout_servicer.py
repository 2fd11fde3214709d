"""RolloutService: prompts are leased, groups come in, and go on to the learner and to verifiers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing
from functools import partial
from typing import Final, TypeVar

from heterorl.v1 import rollout_pb2, rollout_pb2_grpc
from node.coordinator.requests.door import Door
from node.coordinator.requests.rollout_messages import (
    held_out_submission_of,
    hello_from_wire,
    lease_request_from_wire,
    outgoing_to_wire,
    returned_from_wire,
    said_from_wire,
    submission_of,
)
from node.coordinator.requests.submission_door import SubmissionDoor
from node.coordinator.streams.learner_stream import LearnerStream
from node.coordinator.streams.reward_checking import RewardChecking, Verifier
from node.coordinator.work.checks.verifier_places import GRADING_LIMIT_S
from node.coordinator.work.decisions.leasing import release
from node.coordinator.work.decisions.submitted_groups import Submitted
from node.coordinator.work.slots.slot import is_held_out
from node.errors import Reason, RefusedError
from node.rpc.calls.caller import Context, peer_of
from node.system.waits import put_away, side_by_side
from node.telemetry.transfer_metrics import TransferMetrics
from node.values.groups.rollout import EncodedGroup
from node.wire.mapping import to_wire
from node.wire.rollouts import delivery_to_wire, finding_from_wire

HELLO_TIMEOUT_S: Final = 15.0
"""A learner that has not sent its hello by then hangs."""

MESSAGES_IN_FLIGHT: Final = 64
"""A learner's messages that may wait for the ledger: it judges as many groups a second as come in."""

_Request = TypeVar("_Request", rollout_pb2.DrainRolloutsRequest, rollout_pb2.CheckRewardsRequest)


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    def __init__(
        self,
        door: Door,
        checking: RewardChecking,
        submissions: SubmissionDoor,
        *,
        group_bytes: int,
        metrics: TransferMetrics,
    ) -> None:
        """Serve a run whose largest group has ``group_bytes``."""
        self._door = door
        self._checking = checking
        self._submissions = submissions
        self._group_bytes = group_bytes
        self._metrics = metrics

    async def LeasePrompts(  # noqa: N802 - the rpc's name
        self, request: rollout_pb2.LeasePromptsRequest, context: Context
    ) -> rollout_pb2.LeasePromptsResponse:
        peer = peer_of(context)
        grant = await self._door.lease(peer, lease_request_from_wire(peer, request))
        return to_wire(rollout_pb2.LeasePromptsResponse, grant)

    async def ReleaseLeases(  # noqa: N802 - the rpc's name
        self, request: rollout_pb2.ReleaseLeasesRequest, context: Context
    ) -> rollout_pb2.ReleaseLeasesResponse:
        """Accept returned leases, and count the attempts that failed."""
        returned = returned_from_wire(peer_of(context), request)
        decide = partial(release, request=returned)
        released = await self._door.ledger.decide(decide, caller=returned.sampler_id)
        return rollout_pb2.ReleaseLeasesResponse(released=released.leases)

    async def SubmitRollouts(  # noqa: N802 - the rpc's name
        self,
        request_iterator: AsyncIterator[rollout_pb2.SubmitRolloutsRequest | RefusedError],
        context: Context,
    ) -> AsyncIterator[rollout_pb2.SubmitRolloutsResponse]:
        """Accept groups; one that breaks a rule has a verdict, not an error."""
        answers = self._submissions.answers(
            request_iterator, peer_of(context), self._take, group_bytes=self._group_bytes
        )
        async with aclosing(answers) as responses:
            async for response in responses:
                yield response

    async def DrainRollouts(  # noqa: N802 - the rpc's name
        self, request_iterator: AsyncIterator[rollout_pb2.DrainRolloutsRequest], context: Context
    ) -> AsyncIterator[rollout_pb2.DrainRolloutsResponse]:
        """Send groups and acknowledgements while a second task listens to the learner."""
        learners = self._door.learners
        hello = (await _first(request_iterator)).hello
        stream = await learners.open(hello_from_wire(peer_of(context), hello))
        listener = asyncio.create_task(self._listen(request_iterator, stream))
        listener.add_done_callback(lambda _: stream.end())
        try:
            async with aclosing(learners.deliver(stream)) as delivered:
                async for outgoing in delivered:
                    if isinstance(outgoing, EncodedGroup):
                        self._metrics.count_rollouts(sent_bytes=outgoing.size_bytes)
                    yield outgoing_to_wire(outgoing)
        finally:
            stream.end()
            await put_away(listener)
        if not listener.cancelled():
            listener.result()

    async def CheckRewards(  # noqa: N802 - the rpc's name
        self, request_iterator: AsyncIterator[rollout_pb2.CheckRewardsRequest], context: Context
    ) -> AsyncIterator[rollout_pb2.CheckRewardsResponse]:
        """Send groups to a verifier while a second task takes the findings."""
        peer, peers = peer_of(context), self._door.peers
        hello = (await _first(request_iterator)).hello
        peers.check_present(peer)
        peers.check_model(peer)
        if objection := peers.objection_to_grader(peer):
            raise RefusedError(Reason.BUSY, objection, fix="install the run's grader at the verifier")
        verifier = self._checking.admit(
            peer.node_id,
            task_digest=hello.task_digest,
            groups=hello.groups,
            noise_ratio=hello.noise_ratio,
            grades_at_once=hello.grades_at_once,
            grading_limit_s=hello.grading_limit_s or GRADING_LIMIT_S,
        )
        listener = asyncio.create_task(self._take_findings(request_iterator, verifier))
        listener.add_done_callback(lambda _: self._checking.dismiss(verifier))
        try:
            async with aclosing(self._checking.groups(verifier)) as groups:
                async for group, row in groups:
                    peers.check_model(peer)  # the learner may have come since
                    yield rollout_pb2.CheckRewardsResponse(group=delivery_to_wire(group).group, row=row)
        finally:
            await put_away(listener)
        if not listener.cancelled():
            listener.result()

    def _take(self, group: EncodedGroup) -> Awaitable[Submitted]:
        return (
            self._take_held_out(group)
            if is_held_out(group.group_id)
            else self._door.submit(submission_of(group))
        )

    async def _take_held_out(self, group: EncodedGroup) -> Submitted:
        learner = self._door.peers.accounts.learner
        vocabulary_size = None if learner is None else learner.vocabulary_size
        request = await asyncio.to_thread(held_out_submission_of, group, vocabulary_size=vocabulary_size)
        return await self._door.submit(request)

    async def _listen(
        self, requests: AsyncIterator[rollout_pb2.DrainRolloutsRequest], stream: LearnerStream
    ) -> None:
        """Take what the learner says in its order; what it says meanwhile shares the next commit."""
        places = asyncio.Semaphore(MESSAGES_IN_FLIGHT)
        async with side_by_side() as tasks:
            async for request in requests:
                if stream.is_ended:
                    return
                await places.acquire()
                tasks.create_task(self._hear(request, stream)).add_done_callback(lambda _: places.release())

    async def _hear(self, request: rollout_pb2.DrainRolloutsRequest, stream: LearnerStream) -> None:
        await self._door.learners.hear(stream, said_from_wire(request))

    async def _take_findings(
        self, requests: AsyncIterator[rollout_pb2.CheckRewardsRequest], verifier: Verifier
    ) -> None:
        async for request in requests:
            await self._checking.note(verifier, finding_from_wire(request.finding))


async def _first(requests: AsyncIterator[_Request]) -> _Request:
    first = None
    with contextlib.suppress(TimeoutError, StopAsyncIteration):
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            first = await anext(requests)
    if first is None or not first.HasField("hello"):
        raise RefusedError(Reason.MALFORMED, "the stream does not begin with a hello")
    return first
