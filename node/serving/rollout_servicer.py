"""RolloutService at a hub: bounds of the requests. The coordinator's answers, or a relay's, follow."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Protocol

from heterorl.v1 import rollout_pb2, rollout_pb2_grpc
from node.errors import Reason, RefusedError
from node.identity.peer import Peer
from node.limits import LEASES_PER_PEER, LEASES_PER_REQUEST
from node.rollout import EncodedGroup
from node.rpc.auth import Context, peer_of
from node.serving.submission_door import SubmissionDoor
from node.verdict import Verdict


class Rollouts(Protocol):
    """Leases prompts and takes groups in; raises RefusedError where it refuses."""

    @property
    def group_bytes(self) -> int:
        """Size of the largest group of the run, as far as it is known."""
        ...

    async def lease(
        self, peer: Peer, request: rollout_pb2.LeasePromptsRequest
    ) -> rollout_pb2.LeasePromptsResponse:
        """Lease prompts to a sampler."""
        ...

    async def release(
        self, peer: Peer, request: rollout_pb2.ReleaseLeasesRequest
    ) -> rollout_pb2.ReleaseLeasesResponse:
        """Take leases back."""
        ...

    async def take(self, peer: Peer, group: EncodedGroup) -> tuple[Verdict, str]:
        """Take in a group that ``peer`` hands in and whose sampler is proved; return a verdict and why."""
        ...

    def drain(
        self, peer: Peer, requests: AsyncIterator[rollout_pb2.DrainRolloutsRequest]
    ) -> AsyncGenerator[rollout_pb2.DrainRolloutsResponse]:
        """Deliver groups to the learner."""
        ...

    def check_rewards(
        self, peer: Peer, requests: AsyncIterator[rollout_pb2.CheckRewardsRequest]
    ) -> AsyncGenerator[rollout_pb2.CheckRewardsResponse]:
        """Send groups to a verifier."""
        ...


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Serves ``rollouts``."""

    def __init__(self, rollouts: Rollouts, door: SubmissionDoor) -> None:
        """Serve; groups come in through ``door``."""
        self._rollouts = rollouts
        self._door = door

    async def LeasePrompts(  # noqa: N802 - the rpc's name
        self, request: rollout_pb2.LeasePromptsRequest, context: Context
    ) -> rollout_pb2.LeasePromptsResponse:
        check_lease_request(request)
        return await self._rollouts.lease(peer_of(context), request)

    async def ReleaseLeases(  # noqa: N802 - the rpc's name
        self, request: rollout_pb2.ReleaseLeasesRequest, context: Context
    ) -> rollout_pb2.ReleaseLeasesResponse:
        """Accept returned leases, and count the attempts that failed."""
        check_release_request(request)
        return await self._rollouts.release(peer_of(context), request)

    async def SubmitRollouts(  # noqa: N802 - the rpc's name
        self,
        request_iterator: AsyncIterator[rollout_pb2.SubmitRolloutsRequest | RefusedError],
        context: Context,
    ) -> AsyncIterator[rollout_pb2.SubmitRolloutsResponse]:
        """Accept groups; one that breaks a rule has a verdict, not an error."""
        peer = peer_of(context)
        take, group_bytes = partial(self._rollouts.take, peer), self._rollouts.group_bytes
        async with aclosing(
            self._door.answers(request_iterator, peer, take, group_bytes=group_bytes)
        ) as responses:
            async for response in responses:
                yield response

    async def DrainRollouts(  # noqa: N802 - the rpc's name
        self, request_iterator: AsyncIterator[rollout_pb2.DrainRolloutsRequest], context: Context
    ) -> AsyncIterator[rollout_pb2.DrainRolloutsResponse]:
        async with aclosing(self._rollouts.drain(peer_of(context), request_iterator)) as responses:
            async for response in responses:
                yield response

    async def CheckRewards(  # noqa: N802 - the rpc's name
        self, request_iterator: AsyncIterator[rollout_pb2.CheckRewardsRequest], context: Context
    ) -> AsyncIterator[rollout_pb2.CheckRewardsResponse]:
        async with aclosing(self._rollouts.check_rewards(peer_of(context), request_iterator)) as responses:
            async for response in responses:
                yield response


def check_lease_request(request: rollout_pb2.LeasePromptsRequest) -> None:
    """Check the size of a request. Raises RefusedError: MALFORMED."""
    if not 1 <= request.max_leases <= LEASES_PER_REQUEST:
        raise RefusedError(
            Reason.MALFORMED, f"max_leases = {request.max_leases}, allowed are 1 to {LEASES_PER_REQUEST}"
        )


def check_release_request(request: rollout_pb2.ReleaseLeasesRequest) -> None:
    """Check the size of a request. Raises RefusedError: OVER_LIMIT."""
    named = len(request.lease_ids) + len(request.failed)
    if named > LEASES_PER_PEER:
        raise RefusedError(
            Reason.OVER_LIMIT, f"{named} leases to release, at most {LEASES_PER_PEER} are allowed"
        )
