"""Who is in the run; pure.

    join --> joined --beat--> live --no beat for silent_after_s--> silent --for GONE_AFTER_S--> left
                                ^                                    |                           |
                                '---------------beat-----------------'        live --leave------>'

A peer that left must join again; a peer that only fell silent goes on where it was. Joining is
always allowed and repeatable: a peer that comes back from a cut does it every time.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from node.errors import Reason, RefusedError
from node.identity.peer import Peer

GONE_AFTER_S: Final = 3600.0
"""Silence after which a peer counts as having left: longer than any cut or reboot worth waiting for."""

PEERS_REMEMBERED: Final = 4096
"""Peers kept for the status table; past that, those that left are forgotten, longest gone first."""


class PeerState(enum.StrEnum):
    """Closed: also the ``state`` label of metrics."""

    JOINED = "joined"
    LIVE = "live"
    SILENT = "silent"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Member:
    """A peer as the run knows it."""

    peer: Peer
    state: PeerState
    last_seen_s: float
    joins: int
    is_complete: bool = False
    """Whether it has said, at its newest join, what it can say only once it knows the run's settings."""


class Membership:
    """Every peer known, living or not."""

    def __init__(self, *, silent_after_s: float) -> None:
        self._silent_after_s = silent_after_s
        self._members: dict[Peer, Member] = {}

    @property
    def members(self) -> tuple[Member, ...]:
        """Every peer known, in the order of their first join."""
        return tuple(self._members.values())

    def join(self, peer: Peer, now: float, *, completes: bool = False) -> Member:
        """Let a peer in, or in again.

        Args:
            completes: Whether it says what it could not before it knew the run's settings: where the join
                before was without it, that is the same join.
        """
        before = self._members.get(peer)
        if completes and before is not None and before.state is not PeerState.LEFT and not before.is_complete:
            return self._put(replace(before, last_seen_s=now, is_complete=True))
        joins = 0 if before is None else before.joins
        return self._put(Member(peer, PeerState.JOINED, now, joins + 1, is_complete=completes))

    def beat(self, peer: Peer, now: float) -> Member:
        """Note a sign of life.

        Raises:
            RefusedError: NOT_JOINED; the peer is unknown or was given up.
        """
        return self._put(replace(self.present(peer), state=PeerState.LIVE, last_seen_s=now))

    def leave(self, peer: Peer) -> None:
        """Note an orderly end; unknown peers are passed over."""
        if peer in self._members:
            self._put(replace(self._members[peer], state=PeerState.LEFT))

    def present(self, peer: Peer) -> Member:
        """Give a peer that has joined and not left.

        Raises:
            RefusedError: NOT_JOINED.
        """
        member = self._members.get(peer)
        if member is None or member.state is PeerState.LEFT:
            raise RefusedError(
                Reason.NOT_JOINED,
                f"{peer.role} {peer.node_id} is not in the run: the coordinator restarted or gave it up",
                fix="join again",
            )
        return member

    def expire(self, now: float) -> tuple[Member, ...]:
        """Note who has gone silent and who has been silent too long; give those that changed."""
        changed = tuple(self._changed(now))
        for member in changed:
            self._put(member)
        gone = [member for member in self._members.values() if member.state is PeerState.LEFT]
        surplus = max(0, len(self._members) - PEERS_REMEMBERED)
        for member in sorted(gone, key=lambda member: member.last_seen_s)[:surplus]:
            del self._members[member.peer]
        return changed

    def _changed(self, now: float) -> Iterable[Member]:
        for member in self._members.values():
            silence_s = now - member.last_seen_s
            if member.state is PeerState.LEFT:
                continue
            if silence_s > GONE_AFTER_S:
                yield replace(member, state=PeerState.LEFT)
            elif silence_s > self._silent_after_s and member.state is not PeerState.SILENT:
                yield replace(member, state=PeerState.SILENT)

    def _put(self, member: Member) -> Member:
        self._members[member.peer] = member
        return member
