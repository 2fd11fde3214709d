"""How far behind the head every peer is, in versions and in seconds; pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from node.coordinator.versions import VersionLog
from node.identity.peer import Peer
from node.policy import NO_BASE, PolicyVersion


@dataclass(frozen=True, slots=True)
class Lag:
    """One peer's distance to the head."""

    versions: int
    """Head minus held, >= 0; a peer that holds nothing counts as one below version 0."""
    seconds: float
    """Since a version newer than the held one was announced; 0 when current."""


class LagTable:
    """What every peer holds, against what was announced when."""

    def __init__(self, versions: VersionLog) -> None:
        self._versions = versions
        self._held: dict[Peer, PolicyVersion | None] = {}

    def holds(self, peer: Peer, held: PolicyVersion | None) -> None:
        """Note what a peer says it holds."""
        self._held[peer] = held

    def held(self, peer: Peer) -> PolicyVersion | None:
        """Give what a peer holds; None: nothing."""
        return self._held.get(peer)

    def forget(self, peer: Peer) -> None:
        self._held.pop(peer, None)

    def longest(self, peers: Iterable[Peer], *, head: PolicyVersion | None) -> int:
        """Give the largest distance to the ``head`` of those peers that hold more than the base model."""
        held = (self._held.get(peer) for peer in peers)
        numbers = [version.number for version in held if version is not None and version.number > 0]
        return 0 if head is None else max(0, head.number - min(numbers, default=head.number))

    def lag(self, peer: Peer, *, head: PolicyVersion | None, now: float) -> Lag:
        """Give a peer's distance to the ``head``."""
        held = self._held.get(peer)
        number = NO_BASE if held is None else held.number
        if head is None or head.number <= number:
            return Lag(0, 0.0)
        succeeded_at_s = self._versions.succeeded_at_s(number)
        # Announced this moment: not in the log yet.
        seconds = 0.0 if succeeded_at_s is None else max(0.0, now - succeeded_at_s)
        return Lag(head.number - number, seconds)
