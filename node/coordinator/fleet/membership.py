"""Who is in the run; pure.

    join --> joined --heartbeat--> live --no heartbeat for silent_after_s--> silent --for GONE_AFTER_S--> left
                                ^                                    |                           |
                                '---------------heartbeat-----------------'        live --leave------>'

A peer that left must join again; a peer that only fell silent goes on where it was. Joining may be repeated:
a peer does it after every cut.

A name belongs to one process. Processes of one name differ in the instance that each drew when it started.
While one is connected and heard of, another of its name is refused. Learners are told apart by their epochs
instead.
"""

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from node.errors import Reason, RefusedError
from node.identity.peer import Peer
from node.values.roles import Role

GONE_AFTER_S: Final = 3600.0
"""Silence after which a peer counts as having left: longer than any cut or reboot worth waiting for."""

PEERS_REMEMBERED: Final = 16_384
"""Peers kept for the status table; beyond, those that left are forgotten, longest gone first."""


class PeerState(enum.StrEnum):
    """Closed: also the ``state`` label of metrics."""

    JOINED = "joined"
    LIVE = "live"
    SILENT = "silent"
    LEFT = "left"
    REVOKED = "revoked"
    """Shown for a node that is shut out, whatever its membership; nobody's membership is in this state."""


_HERE: Final = frozenset({PeerState.JOINED, PeerState.LIVE})


@dataclass(slots=True)
class KnownPeer:
    """A peer's place in the run; only ``Membership`` changes it."""

    peer: Peer
    state: PeerState
    last_seen_s: float
    joins: int
    instance: str = ""
    """The process that holds the name; empty if processes are not told apart."""
    is_connected: bool = True
    """Whether its heartbeat stream may still be open."""
    refused_twins: int = 0
    refused_twin_at_s: float = 0.0
    is_complete: bool = False
    """Whether its newest join reported what it can only know with the run's settings."""


class Membership:
    def __init__(self, *, silent_after_s: float) -> None:
        self._silent_after_s = silent_after_s
        self._members: dict[Peer, KnownPeer] = {}
        self._counts: Counter[tuple[Role, PeerState]] = Counter()

    @property
    def counts(self) -> Mapping[tuple[Role, PeerState], int]:
        """How many peers of each role are in each state."""
        return self._counts

    @property
    def present_peers(self) -> int:
        """How many peers have joined and not left, silent ones included."""
        return sum(n for (_, state), n in self._counts.items() if state is not PeerState.LEFT)

    def be_patient(self, silent_after_s: float) -> None:
        """Call a peer silent after another time than before."""
        self._silent_after_s = silent_after_s

    @property
    def members(self) -> tuple[KnownPeer, ...]:
        """Every peer known, in the order of their first join."""
        return tuple(self._members.values())

    def join(self, peer: Peer, now: float, *, instance: str = "", completes: bool = False) -> KnownPeer:
        """Admit a peer, or admit it again. Raises RefusedError: NAME_IN_USE.

        Args:
            completes: Whether it reports what it could not before it knew the run's settings. Where the join
                before was without that, this is the same join.
        """
        member = self._members.get(peer)
        if member is None:
            member = self._members[peer] = KnownPeer(peer, PeerState.LEFT, now, joins=0)
            self._counts[peer.role, PeerState.LEFT] += 1
        elif _are_twins(member, instance):
            self._check_not_here(member, now)
        is_begun = member.state is not PeerState.LEFT and member.instance == instance
        is_same_join = completes and is_begun and not member.is_complete
        member.last_seen_s, member.is_connected, member.is_complete = now, True, completes
        if not is_same_join:
            member.joins += 1
            member.instance = instance
            self._become(member, PeerState.JOINED)
        return member

    def instance(self, peer: Peer) -> str:
        """Return which process of a peer's name joined last; empty: none did, or it does not say."""
        return self._members[peer].instance if peer in self._members else ""

    def __len__(self) -> int:
        return len(self._members)

    def heartbeat(self, peer: Peer, now: float, *, instance: str = "") -> bool:
        """Note a sign of life; return whether the peer was not live before.

        Raises:
            RefusedError: NOT_JOINED; NAME_IN_USE, where another process of this name has joined since.
        """
        member = self.present(peer)
        if _are_twins(member, instance):
            self._check_not_here(member, now)
            raise _not_joined(peer)
        member.last_seen_s, member.is_connected = now, True
        return self._become(member, PeerState.LIVE)

    def disconnected(self, peer: Peer) -> None:
        """Note that a peer's stream ended: another process may take its name now."""
        if peer in self._members:
            self._members[peer].is_connected = False

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._members

    def leave(self, peer: Peer) -> None:
        if peer in self._members:
            self._become(self._members[peer], PeerState.LEFT)

    def is_here(self, peer: Peer) -> bool:
        """Whether a peer has joined, has not left and is not silent."""
        return peer in self._members and self._members[peer].state in _HERE

    def present(self, peer: Peer) -> KnownPeer:
        """Return a peer that has joined and not left. Raises RefusedError: NOT_JOINED."""
        member = self._members.get(peer)
        if member is None or member.state is PeerState.LEFT:
            raise _not_joined(peer)
        return member

    def expire(self, now: float) -> tuple[KnownPeer, ...]:
        """Note who has fallen silent and who has been silent too long; return those that changed.

        Where the clock went back, silence begins now: a peer heard of in the future would never end it.
        """
        for member in self._members.values():
            if member.last_seen_s > now:
                member.last_seen_s = now
        changed = tuple(member for member in self._unheard(now) if self._fade(member, now))
        surplus = len(self._members) - PEERS_REMEMBERED
        if surplus <= 0:
            return changed
        gone = [member for member in self._members.values() if member.state is PeerState.LEFT]
        for member in sorted(gone, key=lambda member: member.last_seen_s)[:surplus]:
            self._counts[member.peer.role, member.state] -= 1
            del self._members[member.peer]
        return changed

    def _unheard(self, now: float) -> list[KnownPeer]:
        """Return the members that have been silent too long and not left."""
        since_s = now - min(self._silent_after_s, GONE_AFTER_S)
        return [
            member
            for member in self._members.values()
            if member.last_seen_s < since_s and member.state is not PeerState.LEFT
        ]

    def _fade(self, member: KnownPeer, now: float) -> bool:
        """Note that a member has been silent too long; return whether that changes its state."""
        is_gone = now - member.last_seen_s > GONE_AFTER_S
        return self._become(member, PeerState.LEFT if is_gone else PeerState.SILENT)

    def _check_not_here(self, member: KnownPeer, now: float) -> None:
        """Check that a member may be replaced by another process of its name. Raises RefusedError:
        NAME_IN_USE; it is connected and heard of."""
        silence_s = now - member.last_seen_s
        is_here = member.is_connected and member.state in _HERE
        if not is_here or silence_s > self._silent_after_s:
            return
        member.refused_twins += 1
        member.refused_twin_at_s = now
        raise RefusedError(
            Reason.NAME_IN_USE,
            f"{member.peer.role} {member.peer.node_id} is in the run as another process, "
            f"last heard of {max(0.0, silence_s):.1f} s ago",
            fix="stop one of the two; a peer on a copy of this state directory needs a name of its own: "
            "a new directory and a new token",
        )

    def _become(self, member: KnownPeer, state: PeerState) -> bool:
        """Put a member into a state; return whether it was in another."""
        if member.state is state:
            return False
        self._counts[member.peer.role, member.state] -= 1
        self._counts[member.peer.role, state] += 1
        member.state = state
        return True


def _are_twins(member: KnownPeer, instance: str) -> bool:
    if member.instance == instance or not (member.instance and instance):
        return False
    return member.peer.role is not Role.LEARNER


def _not_joined(peer: Peer) -> RefusedError:
    return RefusedError(
        Reason.NOT_JOINED,
        f"{peer.role} {peer.node_id} is not in the run: the coordinator restarted or gave it up",
        fix="join again",
    )
