"""The samplers that one relay speaks for, on one stream: their sessions, and what each asks and reports.

    join, with a voucher --> session --lease, release, heartbeats--> as by a connection of its own
                               |
                               |-- voucher expired, sampler revoked, joined by another way, left: gone
                               '-- the stream ended: all of them gone

A session is a few hundred bytes and no connection. What a relay says in a session is what it could have kept
from saying; what it may say at all, the sampler's voucher decides.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from heterorl.v1 import membership_pb2, relay_pb2, rollout_pb2
from node.clock import Clock
from node.coordinator.peers import HeartbeatReport
from node.coordinator.run_members import RunMembers
from node.coordinator.run_rollouts import RunRollouts
from node.errors import Reason, RefusedError
from node.identity.peer import Peer
from node.identity.relay_voucher import RelayVoucher, VoucherVerifier, check_current
from node.limits import CARRIED_SESSIONS
from node.run import Role
from node.serving.rollout_servicer import check_lease_request, check_release_request
from node.verdict import GroupVerdict
from node.wire.mapping import from_wire, to_wire
from node.wire.relayed import refusal_to_wire

NO_REPORT: Final = HeartbeatReport(None)


@dataclass(slots=True, eq=False)
class Session:
    """One sampler behind a relay."""

    peer: Peer
    instance: str
    not_after_s: float
    """When its voucher expires."""
    report: HeartbeatReport = NO_REPORT
    lease_ids: tuple[str, ...] = ()
    """Leases it works on, as reported last."""


class CarriedSamplers:
    """The sessions of one stream."""

    def __init__(
        self,
        relay: Peer,
        members: RunMembers,
        rollouts: RunRollouts,
        *,
        vouchers: VoucherVerifier,
        sessions_of: dict[Peer, Session],
        clock: Clock,
    ) -> None:
        """Speak for nobody yet; ``sessions_of`` has the newest session of each sampler, of all streams."""
        self._relay = relay
        self._members = members
        self._rollouts = rollouts
        self._vouchers = vouchers
        self._sessions_of = sessions_of
        self._clock = clock
        self._sessions: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    async def answer(self, request: relay_pb2.CarriedRequest) -> relay_pb2.CarriedAnswer:
        """Answer a sampler's request; a refusal is an answer."""
        number = request.session
        try:
            match request.WhichOneof("request"):
                case "join":
                    joined = await self._join(number, request.join)
                    return relay_pb2.CarriedAnswer(number=request.number, joined=joined)
                case "lease":
                    check_lease_request(request.lease)
                    leased = await self._rollouts.lease(self._session(number).peer, request.lease)
                    return relay_pb2.CarriedAnswer(number=request.number, leased=leased)
                case "release":
                    check_release_request(request.release)
                    released = await self._rollouts.release(self._session(number).peer, request.release)
                    return relay_pb2.CarriedAnswer(number=request.number, released=released)
                case "leave":
                    self._members.leave(self._session(number).peer, via=self._relay.node_id)
                    self._end(number)
                    released = rollout_pb2.ReleaseLeasesResponse()
                    return relay_pb2.CarriedAnswer(number=request.number, released=released)
                case _:
                    raise RefusedError(Reason.MALFORMED, "a carried request without a request")
        except RefusedError as refused:
            return relay_pb2.CarriedAnswer(number=request.number, refused=refusal_to_wire(refused))

    def hear(self, message: relay_pb2.CarryRequest) -> Iterator[relay_pb2.CarriedNotice | None]:
        """Note what samplers report, one a turn; yield what each is to be told, None where it is nothing."""
        for number in message.disconnected:
            self._disconnected(number)
        for heartbeat in message.heartbeats:
            yield self._hear(heartbeat.session, heartbeat.heartbeat)
        for number in message.unchanged:
            yield self._hear(number, None)

    def end(self) -> None:
        """End all sessions: their samplers are not heard of any more."""
        for number in tuple(self._sessions):
            self._disconnected(number)
            self._end(number)

    async def _join(self, number: int, request: membership_pb2.JoinRequest) -> membership_pb2.JoinResponse:
        voucher, now = from_wire(RelayVoucher, request.voucher), self._clock.now()
        self._vouchers.check(voucher, relay_id=self._relay.node_id, instance=request.instance, now=now)
        peer = Peer(self._relay.run_id, Role.SAMPLER, voucher.sampler_id)
        self._check_not_revoked(peer)
        if len(self._sessions) >= CARRIED_SESSIONS:
            self._forget_replaced()
        if number not in self._sessions and len(self._sessions) >= CARRIED_SESSIONS:
            what = f"relay {self._relay.node_id} speaks for {CARRIED_SESSIONS} samplers already"
            raise RefusedError(Reason.BUSY, what, fix="start another relay")
        response = await self._members.join(
            peer,
            request,
            address=f"relay {self._relay.node_id}",
            certificate=voucher.certificate,
            via=self._relay.node_id,
        )
        session = Session(peer, request.instance, voucher.not_after_s)
        self._sessions[number] = self._sessions_of[peer] = session
        return response

    def _hear(
        self, number: int, heartbeat: membership_pb2.HeartbeatRequest | None
    ) -> relay_pb2.CarriedNotice | None:
        """Note a sampler's report; None: it is as before."""
        try:
            session = self._session(number)
            has_heard = session.report is not NO_REPORT
            if heartbeat is None:
                report = replace(session.report, has_heard=has_heard)
            else:
                heartbeat.instance = session.instance
                report = self._members.report_in(session.peer, heartbeat, has_heard=has_heard)
                session.lease_ids = tuple(heartbeat.running_lease_ids)
            answer, lost = self._members.requests.heartbeat(session.peer, report, session.lease_ids)
            session.report = report
        except RefusedError as refused:
            self._end(number)
            return relay_pb2.CarriedNotice(session=number, ended=refusal_to_wire(refused))
        if not (answer.verdicts or answer.must_repair or lost):
            return None
        told = membership_pb2.HeartbeatResponse(
            lost_lease_ids=lost,
            verdicts=[_verdict(one) for one in answer.verdicts],
            must_repair=answer.must_repair,
        )
        return relay_pb2.CarriedNotice(session=number, told=told)

    def _session(self, number: int) -> Session:
        """Return a session that goes on. Raises RefusedError: NOT_JOINED, REVOKED; it does not."""
        session = self._sessions.get(number)
        if session is None or not self._is_current(session):
            self._end(number)
            what = f"{self._relay.node_id} does not speak for this sampler"
            raise RefusedError(Reason.NOT_JOINED, what, fix="join again")
        check_current(session.peer.node_id, session.not_after_s, now=self._clock.now())
        self._check_not_revoked(session.peer)
        return session

    def _forget_replaced(self) -> None:
        """End the sessions of samplers that have joined anew since, here or elsewhere, or are gone."""
        for number, session in tuple(self._sessions.items()):
            if not self._is_current(session):
                self._end(number)

    def _is_current(self, session: Session) -> bool:
        """Return whether the sampler has not joined by another way since."""
        via = self._members.requests.peers.via(session.peer)
        return self._sessions_of.get(session.peer) is session and via == self._relay.node_id

    def _check_not_revoked(self, peer: Peer) -> None:
        if self._members.revocations.is_revoked(peer.node_id):
            what = f"{peer.node_id} was revoked"
            raise RefusedError(Reason.REVOKED, what, fix="ask the operator of the run")

    def _disconnected(self, number: int) -> None:
        session = self._sessions.get(number)
        if session is not None and self._sessions_of.get(session.peer) is session:
            self._members.disconnected(session.peer, via=self._relay.node_id)

    def _end(self, number: int) -> None:
        session = self._sessions.pop(number, None)
        if session is not None and self._sessions_of.get(session.peer) is session:
            del self._sessions_of[session.peer]


def _verdict(verdict: GroupVerdict) -> membership_pb2.GroupVerdict:
    return to_wire(membership_pb2.GroupVerdict, verdict)
