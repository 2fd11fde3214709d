"""RolloutService: bounds of the requests. ``RunRollouts`` has the answers."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from heterorl.v1 import rollout_pb2, rollout_pb2_grpc
from node.coordinator.run_rollouts import RunRollouts
from node.coordinator.submission_door import SubmissionDoor
from node.errors import Reason, RefusedError
from node.limits import LEASES_PER_PEER, LEASES_PER_REQUEST
from node.rpc.auth import Context, peer_of


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Serves ``rollouts``."""

    def __init__(self, rollouts: RunRollouts, door: SubmissionDoor) -> None:
        """Serve; groups come in through ``door``."""
        self._rollouts = rollouts
        self._door = door

    async def LeasePrompts(  # noqa: N802 - the rpc's name
        self, request: rollout_pb2.LeasePromptsRequest, context: Context
    ) -> rollout_pb2.LeasePromptsResponse:
        if not 1 <= request.max_leases <= LEASES_PER_REQUEST:
            raise RefusedError(
                Reason.MALFORMED, f"max_leases = {request.max_leases}, allowed are 1 to {LEASES_PER_REQUEST}"
            )
        return await self._rollouts.lease(peer_of(context), request)

    async def ReleaseLeases(  # noqa: N802 - the rpc's name
        self, request: rollout_pb2.ReleaseLeasesRequest, context: Context
    ) -> rollout_pb2.ReleaseLeasesResponse:
        """Accept returned leases, and count the attempts that failed."""
        named = len(request.lease_ids) + len(request.failed)
        if named > LEASES_PER_PEER:
            raise RefusedError(
                Reason.OVER_LIMIT, f"{named} leases to release, at most {LEASES_PER_PEER} are allowed"
            )
        return await self._rollouts.release(peer_of(context), request)

    async def SubmitRollouts(  # noqa: N802 - the rpc's name
        self,
        request_iterator: AsyncIterator[rollout_pb2.SubmitRolloutsRequest | RefusedError],
        context: Context,
    ) -> AsyncIterator[rollout_pb2.SubmitRolloutsResponse]:
        """Accept groups; one that breaks a rule has a verdict, not an error."""
        peer = peer_of(context)
        async with aclosing(
            self._door.answers(
                request_iterator, peer, self._rollouts.take, group_bytes=self._rollouts.group_bytes
            )
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
