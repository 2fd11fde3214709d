"""MembershipService: the life of heartbeat streams. ``RunMembers`` has the answers."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Final

from heterorl.v1 import membership_pb2, membership_pb2_grpc
from node.coordinator.run_members import RunMembers
from node.identity.peer import Peer
from node.rpc.auth import Context, certificate_of, peer_of

logger = logging.getLogger(__name__)

CUT_NOTICE_S: Final = 0.2
"""Longer than gRPC takes to report a cut stream, shorter than a leaving peer waits for its answer."""


class MembershipServicer(membership_pb2_grpc.MembershipServiceServicer):
    """Serves ``members`` to their peers."""

    def __init__(self, members: RunMembers) -> None:
        self._members = members
        self._streams: dict[Peer, object] = {}

    async def Join(  # noqa: N802 - the rpc's name
        self, request: membership_pb2.JoinRequest, context: Context
    ) -> membership_pb2.JoinResponse:
        return await self._members.join(
            peer_of(context), request, address=context.peer(), certificate=certificate_of(context)
        )

    async def Heartbeat(  # noqa: N802 - the rpc's name
        self, request_iterator: AsyncIterator[membership_pb2.HeartbeatRequest], context: Context
    ) -> AsyncIterator[membership_pb2.HeartbeatResponse]:
        """Answer each heartbeat; a peer that ends its stream in good order leaves the run."""
        peer, address = peer_of(context), context.peer()
        stream, has_heard = object(), False
        try:
            async for request in request_iterator:
                answer = self._members.heartbeat(peer, request, has_heard=has_heard, address=address)
                if not has_heard:
                    # Only now: a stream that is refused does not take the place of one that goes on.
                    self._streams[peer] = stream
                yield answer
                has_heard = True
            self._disconnected(peer, stream)
            # To gRPC a stream that was cut ends like any other; it cancels this task a moment later.
            await asyncio.sleep(CUT_NOTICE_S)
            # A peer that came back after a cut has a newer stream by now.
            if self._streams.get(peer) is stream:
                self._members.leave(peer)
                logger.info("peer left", extra={"peer_role": peer.role, "node_id": peer.node_id})
        finally:
            self._disconnected(peer, stream)
            if self._streams.get(peer) is stream:
                del self._streams[peer]

    async def GetStatus(  # noqa: N802 - the rpc's name
        self, request: membership_pb2.GetStatusRequest, context: Context
    ) -> membership_pb2.GetStatusResponse:
        return self._members.status(request)

    def _disconnected(self, peer: Peer, stream: object) -> None:
        if self._streams.get(peer) is stream:
            self._members.disconnected(peer)
