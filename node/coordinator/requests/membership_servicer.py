"""MembershipService: peers join, send heartbeats and leave, and ask for the state of the run."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Final

from heterorl.v1 import common_pb2, membership_pb2, membership_pb2_grpc
from node.coordinator.requests.door import Door
from node.coordinator.requests.member_messages import heartbeat_response, joining_from_wire, report_from_wire
from node.coordinator.run_status import RunReport
from node.enrolment.renewal import Renewal
from node.errors import Reason, RefusedError
from node.identity.peer import Peer
from node.rpc.calls.caller import Context, certificate_of, peer_of
from node.values.roles import Role
from node.values.run import PeerQuery
from node.wire.mapping import from_wire, to_wire

logger = logging.getLogger(__name__)

CUT_NOTICE_S: Final = 0.2
"""Longer than gRPC takes to report a cut stream, shorter than a leaving peer waits for its answer."""

LARGE_FLEET_PEERS: Final = 50
SHARED_STATUS_S: Final = 0.5
"""In a large fleet, all who ask for the first page within so long get the same: with 200 peers it takes 10 ms
to make, and every member may ask."""


class MembershipServicer(membership_pb2_grpc.MembershipServiceServicer):
    def __init__(
        self,
        door: Door,
        report: RunReport,
        *,
        settings: membership_pb2.JoinResponse,
        renewal: Renewal,
        move: Callable[[], bytes],
    ) -> None:
        """Serve.

        Args:
            settings: What a peer that joins is told, for each to be completed.
            move: Returns the notice of where the coordinator will be; empty: it stays.
        """
        self._door = door
        self._report = report
        self._settings = settings
        self._renewal = renewal
        self._move = move
        self._streams: dict[Peer, object] = {}
        self._told: tuple[bytes, set[Peer]] = (b"", set())
        """A notice of a move, and who has it."""
        self._shared_status: tuple[float, membership_pb2.GetStatusResponse] | None = None

    async def Join(  # noqa: N802 - the rpc's name
        self, request: membership_pb2.JoinRequest, context: Context
    ) -> membership_pb2.JoinResponse:
        peer = peer_of(context)
        joining = joining_from_wire(peer, request, run_id=self._report.run_id, run=self._settings)
        try:
            member = await self._door.join(peer, joining)
        except RefusedError as refused:
            self._note_twin(peer, context, refused)
            raise
        logger.info(
            "peer joined",
            extra={
                "peer_role": peer.role,
                "node_id": peer.node_id,
                "joins": member.joins,
                **({"prompts": request.prompts} if request.prompts else {}),
                "software_version": joining.speaks.software_version,
                "protocol": joining.speaks.protocol,
            },
        )
        response = membership_pb2.JoinResponse()
        response.CopyFrom(self._settings)
        grader, head = self._door.peers.accounts.grader, self._door.peers.head
        response.grader_digest, response.grader_said_by = grader.digest, grader.said_by
        certificate, protocol = certificate_of(context), joining.speaks.protocol
        response.certificate = self._renewal.certificate_for(peer, certificate, protocol=protocol)
        response.moved = self._notice_for(peer, joins=True)
        if head is not None:
            response.head.CopyFrom(to_wire(common_pb2.PolicyVersion, head))
        return response

    async def Heartbeat(  # noqa: N802 - the rpc's name
        self, request_iterator: AsyncIterator[membership_pb2.HeartbeatRequest], context: Context
    ) -> AsyncIterator[membership_pb2.HeartbeatResponse]:
        """Answer each heartbeat; a peer that ends its stream in good order leaves the run."""
        peer = peer_of(context)
        stream, has_heard = object(), False
        try:
            async for request in request_iterator:
                try:
                    answer = self._heartbeat(peer, request, has_heard=has_heard)
                except RefusedError as refused:
                    self._note_twin(peer, context, refused)
                    raise
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
                self._door.peers.leave(peer)
                logger.info("peer left", extra={"peer_role": peer.role, "node_id": peer.node_id})
        finally:
            self._disconnected(peer, stream)
            if self._streams.get(peer) is stream:
                del self._streams[peer]

    async def GetStatus(  # noqa: N802 - the rpc's name
        self, request: membership_pb2.GetStatusRequest, context: Context
    ) -> membership_pb2.GetStatusResponse:
        """Return the state of the run, with a page of its peers."""
        now = self._door.clock.now()
        if request.HasField("query"):
            query = from_wire(PeerQuery, request.query)
            return to_wire(membership_pb2.GetStatusResponse, self._report.status(query))
        if self._shared_status is not None and 0 <= now - self._shared_status[0] < SHARED_STATUS_S:
            return self._shared_status[1]
        answer = to_wire(membership_pb2.GetStatusResponse, self._report.status(PeerQuery()))
        self._shared_status = (now, answer) if len(answer.peers) >= LARGE_FLEET_PEERS else None
        return answer

    def _heartbeat(
        self, peer: Peer, request: membership_pb2.HeartbeatRequest, *, has_heard: bool
    ) -> membership_pb2.HeartbeatResponse:
        received_at_s = self._door.clock.now()
        report = report_from_wire(peer, request, has_heard=has_heard)
        answer, lost = self._door.heartbeat(peer, report, tuple(request.running_lease_ids))
        return heartbeat_response(
            answer,
            sequence=request.sequence,
            received_at_s=received_at_s,
            sent_at_s=self._door.clock.now(),
            lost_lease_ids=lost,
            revocations=self._revocations_for(peer, request.revocations_digest),
            moved=self._notice_for(peer, joins=False),
        )

    def _notice_for(self, peer: Peer, *, joins: bool) -> bytes:
        """Return the notice of a move for a peer that joins, or does not have it yet; else nothing.

        One whose answer is lost joins again.
        """
        notice = self._move()
        if notice != self._told[0]:
            self._told = notice, set()
        told = self._told[1]
        if not notice or (peer in told and not joins):
            return b""
        told.add(peer)
        return notice

    def _revocations_for(self, peer: Peer, digest: bytes) -> membership_pb2.Revocations | None:
        if peer.role is not Role.RELAY and not digest:  # it serves nobody
            return None
        current = self._door.revocations.current()
        return None if digest == current.digest else to_wire(membership_pb2.Revocations, current)

    def _note_twin(self, peer: Peer, context: Context, refused: RefusedError) -> None:
        """Count and log a process that is refused because another of its name is here."""
        if refused.reason is Reason.NAME_IN_USE:
            self._door.peers.count_twin()
            about = {"peer_role": peer.role, "node_id": peer.node_id, "refused": context.peer()}
            logger.warning("two processes use one name", extra={**about, "detail": str(refused)})

    def _disconnected(self, peer: Peer, stream: object) -> None:
        if self._streams.get(peer) is stream:
            self._door.peers.disconnected(peer)
