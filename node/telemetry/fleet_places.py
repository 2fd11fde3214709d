"""Which peers have a place in the fleet's metrics when there are more peers than places; pure.

    ask --> placed <--a place is free-- waiting <-- ask
              |  '--a peer of a better rank asks, and all is full--^
              '--give_up--> forgotten; the first that waits is placed

The learner comes before relays, relays before samplers. Among samplers, those that have been live the longest
without a break have the places: one continuous series is worth more than several that take turns. Every
call is O(1), however many peers there are.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from node.identity.peer import Peer
from node.run import Role

_RANKS: Final = {Role.LEARNER: 0, Role.COORDINATOR: 0, Role.OPERATOR: 0, Role.RELAY: 1, Role.SAMPLER: 2}
"""A role of a lower rank takes the place of one of a higher rank."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request for a place."""

    has_place: bool
    displaced: Peer | None = None
    """The peer that lost its place to this one."""


@dataclass(slots=True)
class _Rank:
    placed: OrderedDict[Peer, None] = field(default_factory=OrderedDict)
    """In the order they got their places."""
    waiting: OrderedDict[Peer, None] = field(default_factory=OrderedDict)
    """In the order they will get places."""


class FleetPlaces:
    """At most ``capacity`` peers with a place, and the peers that wait for one."""

    def __init__(self, *, capacity: int) -> None:
        self._capacity = capacity
        self._ranks = tuple(_Rank() for _ in range(max(_RANKS.values()) + 1))

    def __contains__(self, peer: Peer) -> bool:
        """Return whether a peer has a place."""
        return peer in self._rank_of(peer).placed

    def waiting(self, role: Role) -> int:
        """Return how many peers of a role's rank have no place. Any thread."""
        return len(self._ranks[_RANKS[role]].waiting)

    def ask(self, peer: Peer) -> Answer:
        """Place a peer if there is room or a peer of a worse rank to displace; else put it in the queue."""
        rank = self._rank_of(peer)
        if peer in rank.placed:
            return Answer(has_place=True)
        if self._has_room:
            rank.placed[peer] = None
            return Answer(has_place=True)
        # No peer of this rank waits where a worse one has a place: free places go to the best rank first.
        for worse in reversed(self._ranks[_RANKS[peer.role] + 1 :]):
            if worse.placed:
                displaced, _ = worse.placed.popitem()
                worse.waiting[displaced] = None
                worse.waiting.move_to_end(displaced, last=False)
                rank.placed[peer] = None
                return Answer(has_place=True, displaced=displaced)
        rank.waiting[peer] = None
        return Answer(has_place=False)

    def give_up(self, peer: Peer) -> None:
        """Forget a peer; its place goes to the first in the queue."""
        rank = self._rank_of(peer)
        rank.waiting.pop(peer, None)
        rank.placed.pop(peer, None)
        # While anyone waits every other place is taken: there is room for one at most.
        heirs = (rank for rank in self._ranks if rank.waiting)
        if self._has_room and (heir := next(heirs, None)) is not None:
            first, _ = heir.waiting.popitem(last=False)
            heir.placed[first] = None

    @property
    def _has_room(self) -> bool:
        return sum(len(rank.placed) for rank in self._ranks) < self._capacity

    def _rank_of(self, peer: Peer) -> _Rank:
        return self._ranks[_RANKS[peer.role]]
