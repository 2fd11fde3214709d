"""Answers of a relay to its samplers: the coordinator's decisions, handed up and down by the carrier.

Heartbeats are answered at once with what the last summary brought; everything else goes up and comes down.
Groups go into the relay's own spool.
"""

import random as randomness
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass

from heterorl.v1 import membership_pb2, rollout_pb2
from node import limits
from node.clock import Clock
from node.errors import Reason, RefusedError
from node.identity.own_identity import RenewedCertificates
from node.identity.peer import Peer
from node.relay.carrier import Carrier
from node.relay.forwarder import Forwarder
from node.relay.sampler_sessions import Sessions
from node.rollout import EncodedGroup
from node.run import Role
from node.serving.heartbeat_pause import drawn_pause_s
from node.verdict import Verdict


@dataclass(slots=True, eq=False)
class CarriedMembers:
    """Answers to the members of a run that dial this relay."""

    relay_id: str
    sessions: Sessions
    carrier: Carrier
    clock: Clock
    renewed: RenewedCertificates
    """Certificates of samplers that the coordinator made anew."""
    clock_offset_s: Callable[[], float]
    """The coordinator's clock minus this relay's."""
    random: Callable[[], float] = randomness.random

    async def join(
        self, peer: Peer, request: membership_pb2.JoinRequest, *, address: str, certificate: bytes
    ) -> membership_pb2.JoinResponse:
        """Ask the coordinator to admit a sampler; one without a voucher is told for whom to write it."""
        if peer.role is not Role.SAMPLER:
            raise _not_here(f"a {peer.role} joins at the coordinator")
        if request.voucher.relay_id != self.relay_id:
            return membership_pb2.JoinResponse(relay_id=self.relay_id)
        if request.voucher.sampler_id != peer.node_id:
            what = f"{peer.node_id} brings the voucher of {request.voucher.sampler_id[:100]!r}"
            raise RefusedError(Reason.BAD_SIGNATURE, what)
        await self.carrier.connected()
        number = self.sessions.next_number()
        answer = await self.carrier.ask(number, join=request)
        self.sessions.open(peer, number, request.instance)
        if answer.joined.certificate:
            self.renewed.note(answer.joined.certificate, now=self.clock.now())
        answer.joined.relay_id = self.relay_id
        return answer.joined

    def heartbeat(
        self, peer: Peer, request: membership_pb2.HeartbeatRequest, *, has_heard: bool, address: str
    ) -> membership_pb2.HeartbeatResponse:
        now = self.clock.now() + self.clock_offset_s()
        if len(request.running_lease_ids) > limits.LEASES_PER_PEER:
            what = f"a heartbeat names {len(request.running_lease_ids)} leases"
            raise RefusedError(Reason.OVER_LIMIT, f"{what}, allowed are {limits.LEASES_PER_PEER}")
        response = self.sessions.heard(peer, request, has_heard=has_heard)
        response.sequence, response.received_at_s = request.sequence, now
        if self.carrier.head is not None:
            response.head.CopyFrom(self.carrier.head)
        response.next_heartbeat_s = drawn_pause_s(self.carrier.pause_s, self.random())
        response.sent_at_s = self.clock.now() + self.clock_offset_s()
        return response

    def disconnected(self, peer: Peer) -> None:
        self.sessions.disconnected(peer)
        self.carrier.notice_disconnected()

    def leave(self, peer: Peer) -> None:
        if (number := self.sessions.leave(peer)) is not None:
            self.carrier.leave(number)

    def status(self, request: membership_pb2.GetStatusRequest) -> membership_pb2.GetStatusResponse:
        raise _not_here("the coordinator has the state of the run")


@dataclass(slots=True, eq=False)
class CarriedRollouts:
    """Leases by the coordinator; groups into this relay's spool."""

    sessions: Sessions
    carrier: Carrier
    forwarder: Forwarder
    known_group_bytes: Callable[[], int | None]
    """Size of the largest group of the run; None: not known yet."""

    @property
    def group_bytes(self) -> int:
        return self.known_group_bytes() or limits.ROLLOUT_MESSAGE_BYTES

    async def lease(
        self, peer: Peer, request: rollout_pb2.LeasePromptsRequest
    ) -> rollout_pb2.LeasePromptsResponse:
        answer = await self.carrier.ask(self.sessions.of(peer).number, lease=request)
        return answer.leased

    async def release(
        self, peer: Peer, request: rollout_pb2.ReleaseLeasesRequest
    ) -> rollout_pb2.ReleaseLeasesResponse:
        answer = await self.carrier.ask(self.sessions.of(peer).number, release=request)
        return answer.released

    async def take(self, peer: Peer, group: EncodedGroup) -> tuple[Verdict, str]:
        """Spool a group, unread; the coordinator's verdict follows in a heartbeat, if it is another one."""
        return (Verdict.SPOOLED if await self.forwarder.take(group) else Verdict.DUPLICATE), ""

    async def drain(
        self, peer: Peer, requests: AsyncIterator[rollout_pb2.DrainRolloutsRequest]
    ) -> AsyncGenerator[rollout_pb2.DrainRolloutsResponse]:
        raise _not_here("a relay delivers nothing to learners")
        yield

    async def check_rewards(
        self, peer: Peer, requests: AsyncIterator[rollout_pb2.CheckRewardsRequest]
    ) -> AsyncGenerator[rollout_pb2.CheckRewardsResponse]:
        raise _not_here("a relay has nothing to check")
        yield


def _not_here(what: str) -> RefusedError:
    return RefusedError(Reason.WRONG_ROLE, what, fix="dial the coordinator")
