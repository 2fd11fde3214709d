"""How far behind the head every peer is, in versions and in seconds; pure."""

from collections import Counter
from dataclasses import dataclass

from node.coordinator.work.version_log import VersionLog
from node.identity.peer import Peer
from node.policy import NO_BASE, PolicyVersion
from node.run import Role


@dataclass(frozen=True, slots=True)
class Lag:
    """One peer's distance to the head."""

    versions: int
    """Head minus held, >= 0; a peer that holds nothing counts as one below version 0."""
    seconds: float
    """Since a version newer than the held one was announced; 0 when current."""


class LagTable:
    """What every peer holds, compared with what was announced when."""

    def __init__(self, versions: VersionLog) -> None:
        self._versions = versions
        self._held: dict[Peer, PolicyVersion | None] = {}
        self._number_of: dict[Peer, int] = {}
        """Of samplers in the run that hold more than the base model."""
        self._holders = Counter[int]()
        """How many of them hold each version: few numbers, however many samplers."""

    def holds(self, peer: Peer, held: PolicyVersion | None) -> None:
        """Note what a peer reports it holds."""
        self._held[peer] = held
        self._recount(peer, 0 if held is None or peer.role is not Role.SAMPLER else held.number)

    def held(self, peer: Peer) -> PolicyVersion | None:
        """Return what a peer holds; None: nothing."""
        return self._held.get(peer)

    def leave(self, peer: Peer) -> None:
        """Count a peer no longer among those that hold a version; what it held last is still known."""
        self._recount(peer, 0)

    def forget(self, peer: Peer) -> None:
        self._held.pop(peer, None)
        self._recount(peer, 0)

    def longest(self, *, head: PolicyVersion | None) -> int:
        """Return the largest distance to the ``head`` of samplers that hold more than the base model."""
        return 0 if head is None else max(0, head.number - min(self._holders, default=head.number))

    def lag(self, peer: Peer, *, head: PolicyVersion | None, now: float) -> Lag:
        """Return a peer's distance to the ``head``."""
        held = self._held.get(peer)
        number = NO_BASE if held is None else held.number
        if head is None or head.number <= number:
            return Lag(0, 0.0)
        succeeded_at_s = self._versions.succeeded_at_s(number)
        # Announced this moment: not in the log yet.
        seconds = 0.0 if succeeded_at_s is None else max(0.0, now - succeeded_at_s)
        return Lag(head.number - number, seconds)

    def _recount(self, peer: Peer, number: int) -> None:
        before = self._number_of.pop(peer, 0)
        if before > 0:
            self._holders[before] -= 1
            if not self._holders[before]:
                del self._holders[before]
        if number > 0:
            self._number_of[peer] = number
            self._holders[number] += 1
