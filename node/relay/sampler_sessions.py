"""The samplers behind a relay: what each reported since the last summary, and what it is to be told.

    join --> session --heartbeat--> heard --summary, to the coordinator--> reported
                ^                                                            |
                '-- lost leases, verdicts, doubts: with the next heartbeat --'

A session ends when its sampler leaves, joins anew, or the coordinator says so; all end with the stream.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from heterorl.v1 import membership_pb2, relay_pb2
from node.errors import Reason, RefusedError
from node.identity.peer import Peer
from node.limits import CARRIED_HEARTBEATS, VERDICTS_PER_HEARTBEAT
from node.serving.pending_verdicts import PendingVerdicts
from node.verdict import GroupVerdict
from node.wire.mapping import from_wire, to_wire
from node.wire.relayed import refusal_from_wire

MESSAGE_BYTES: Final = 1 << 20
"""A part of a summary is not made larger by another report."""

UNHEARD_S: Final = 3600.0
"""Silence after which a session is forgotten: the coordinator counts its sampler as gone by then."""

_WAITS_FOR_CHARACTERS: Final = 100

_CLOCK_STEP_S: Final = 0.1
"""Clock offsets that differ by less are reported as the same: each heartbeat makes another estimate."""


@dataclass(slots=True, eq=False)
class Session:
    """One sampler."""

    peer: Peer
    number: int
    instance: str
    newest: bytes = b""
    """Its newest report, encoded."""
    reported: bytes | None = None
    """The report that the coordinator has; None: none yet."""
    held: bytes = b""
    """The version it held by that report, encoded."""
    lost: tuple[str, ...] = ()
    verdicts: PendingVerdicts = field(
        default_factory=lambda: PendingVerdicts(capacity=VERDICTS_PER_HEARTBEAT)
    )
    must_repair: bool = False
    ended: RefusedError | None = None
    heard_s: float | None = None
    """When ``forget_unheard`` last found that it had been heard of."""


class Sessions:
    """All sessions of one stream to the coordinator, and those of none since."""

    def __init__(self) -> None:
        self._of: dict[Peer, Session] = {}
        self._by_number: dict[int, Session] = {}
        self._numbers = itertools.count(1)
        self._heard: dict[Session, None] = {}
        """Heard of since the last summary."""
        self._disconnected: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._of)

    def next_number(self) -> int:
        """Return a number for a new session."""
        return next(self._numbers)

    def open(self, peer: Peer, number: int, instance: str) -> None:
        """Begin a session, in place of an older one of this sampler."""
        self._forget(self._of.get(peer))
        self._of[peer] = self._by_number[number] = Session(peer, number, instance)

    def of(self, peer: Peer) -> Session:
        """Return a sampler's session. Raises RefusedError: NOT_JOINED, or why it has ended."""
        session = self._of.get(peer)
        if session is None:
            raise RefusedError(
                Reason.NOT_JOINED,
                f"{peer.node_id} is not in the run by this relay: it or the coordinator restarted",
                fix="join again",
            )
        if session.ended is not None:
            self._forget(session)
            raise session.ended
        return session

    def heard(
        self, peer: Peer, request: membership_pb2.HeartbeatRequest, *, has_heard: bool
    ) -> membership_pb2.HeartbeatResponse:
        """Note a heartbeat; return what the coordinator has for its sampler.

        Raises RefusedError: NOT_JOINED, where another process of this name has joined since; see ``of``.
        """
        session = self.of(peer)
        if session.instance != request.instance:
            what = f"another process of {peer.node_id} has joined"
            raise RefusedError(Reason.NOT_JOINED, what, fix="join again")
        session.newest, self._heard[session] = _report(request), None
        verdicts = session.verdicts.take(VERDICTS_PER_HEARTBEAT, has_heard=has_heard)
        held = request.held.SerializeToString(deterministic=True)
        response = membership_pb2.HeartbeatResponse(
            lost_lease_ids=session.lost,
            verdicts=[to_wire(membership_pb2.GroupVerdict, one) for one in verdicts],
            must_repair=session.must_repair and held == session.held,
        )
        session.lost, session.must_repair = (), False  # the coordinator repeats them while they hold
        return response

    def disconnected(self, peer: Peer) -> None:
        """Note that a sampler's heartbeat stream ended."""
        if peer in self._of:
            self._disconnected[self._of[peer].number] = None

    def leave(self, peer: Peer) -> int | None:
        """End a session; return its number."""
        session = self._of.get(peer)
        self._forget(session)
        return None if session is None else session.number

    def told(self, notice: relay_pb2.CarriedNotice) -> int:
        """Keep what a sampler is to be told; return how many verdicts had to go for it.

        Raises RefusedError: MALFORMED; it cannot be read.
        """
        session = self._by_number.get(notice.session)
        if session is None:
            return 0
        if notice.HasField("ended"):
            session.ended = refusal_from_wire(notice.ended)
            return 0
        session.lost = tuple(notice.told.lost_lease_ids)
        session.must_repair = notice.told.must_repair
        return sum(session.verdicts.put(from_wire(GroupVerdict, one)) for one in notice.told.verdicts)

    def take_disconnected(self) -> list[int]:
        """Return the sessions that ended their streams since the last call."""
        taken, self._disconnected = self._disconnected, {}
        return list(taken)

    def summary(self, number: int) -> Iterator[relay_pb2.CarryRequest]:
        """Yield the parts of a summary of what was heard since the one before; the last is numbered."""
        heard, self._heard = self._heard, {}
        part, size_bytes = relay_pb2.CarryRequest(), 0
        for session in heard:
            if session.ended is not None or self._of.get(session.peer) is not session:
                continue
            if session.newest == session.reported:
                part.unchanged.append(session.number)
                continue
            if len(part.heartbeats) == CARRIED_HEARTBEATS or size_bytes > MESSAGE_BYTES:
                yield part
                part, size_bytes = relay_pb2.CarryRequest(), 0
            carried = part.heartbeats.add(session=session.number)
            carried.heartbeat.ParseFromString(session.newest)
            session.reported = session.newest
            session.held = carried.heartbeat.held.SerializeToString(deterministic=True)
            size_bytes += len(session.newest)
        part.summary = number
        yield part

    def forget_unheard(self, now: float) -> None:
        """Forget samplers that crashed or went elsewhere; call it before each ``summary``."""
        for session in tuple(self._of.values()):
            if session.heard_s is None or session in self._heard:
                session.heard_s = now
            elif now - session.heard_s > UNHEARD_S:
                self._forget(session)

    def clear(self) -> None:
        """End all: the coordinator knows none of them any more."""
        self._of.clear()
        self._by_number.clear()
        self._heard.clear()
        self._disconnected.clear()

    def _forget(self, session: Session | None) -> None:
        if session is not None:
            del self._of[session.peer], self._by_number[session.number]
            self._heard.pop(session, None)
            self._disconnected.pop(session.number, None)


def _report(request: membership_pb2.HeartbeatRequest) -> bytes:
    report = membership_pb2.HeartbeatRequest(
        held=request.held if request.HasField("held") else None,
        running_lease_ids=request.running_lease_ids,
        clock_offset_s=round(request.clock_offset_s / _CLOCK_STEP_S) * _CLOCK_STEP_S
        if abs(request.clock_offset_s) < 1e9
        else request.clock_offset_s,
        waits_for=request.waits_for[:_WAITS_FOR_CHARACTERS],
    )
    return report.SerializeToString(deterministic=True)
