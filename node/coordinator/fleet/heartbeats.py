"""How long peers wait between two heartbeats, by how many they are, and the verdicts that answers tell; pure.

A fleet of up to ``HEARTBEATS_PER_S`` times the configured interval keeps that interval. In a larger one each
peer waits longer, so that the coordinator spends the same on heartbeats however many peers there are.
Samplers that were leased nothing wait as long before they ask again. Each pause is drawn anew, so that peers
that came back at one moment do not stay in step.

Verdicts are repeated until their sampler has heard them:

    put --> waiting --take--> told --the next heartbeat of the same stream--> gone
               ^               |
               '--- a new stream: the answer may have been lost with the one before ---'
"""

from collections import deque
from collections.abc import Set
from typing import Final

from node.values.groups.verdict import GroupVerdict

HEARTBEATS_PER_S: Final = 1000.0
"""Limit for the whole fleet: three quarters of a core (``python -m bench.peers``)."""

JITTER: Final = 0.2
"""Each pause is up to so much of it shorter or longer."""

LEASE_PART: Final = 4.0
"""A lease lasts at least so many pauses, since heartbeats renew it."""

SILENT_PAUSES: Final = 3.0
"""A peer is not silent before it has missed so many."""


def pause_s(*, interval_s: float, peers: int, lease_ttl_s: float) -> float:
    """Return the mean pause of a fleet of so many ``peers``."""
    return max(interval_s, min(peers / HEARTBEATS_PER_S, lease_ttl_s / LEASE_PART))


def drawn_pause_s(mean_s: float, random: float) -> float:
    """Return one pause; ``random`` is in [0, 1)."""
    return mean_s * (1.0 + JITTER * (2.0 * random - 1.0))


def silence_s(*, configured_s: float, pause_s: float) -> float:
    """Return the time without a heartbeat after which a peer is silent."""
    return max(configured_s, SILENT_PAUSES * pause_s)


class UnheardVerdicts:
    """The verdicts that samplers have not heard, by sampler; at most ``capacity`` each."""

    def __init__(self, *, capacity: int) -> None:
        self._capacity = capacity
        self._of: dict[str, PendingVerdicts] = {}

    def put(self, sampler_id: str, verdict: GroupVerdict) -> int:
        """Keep a verdict; return how many were dropped for it."""
        return self._of.setdefault(sampler_id, PendingVerdicts(capacity=self._capacity)).put(verdict)

    def take(self, sampler_id: str, limit: int, *, has_heard: bool) -> tuple[GroupVerdict, ...]:
        """Return up to ``limit`` verdicts to tell, oldest first; ``has_heard``: those told last."""
        pending = self._of.get(sampler_id)
        return () if pending is None else pending.take(limit, has_heard=has_heard)

    def keep_only(self, sampler_ids: Set[str]) -> int:
        """Forget all but these samplers; return how many verdicts were dropped."""
        return sum(len(self._of.pop(sampler_id)) for sampler_id in self._of.keys() - sampler_ids)


class PendingVerdicts:
    """At most ``capacity`` verdicts; beyond, the oldest go."""

    def __init__(self, *, capacity: int) -> None:
        self._waiting: deque[GroupVerdict] = deque(maxlen=capacity)
        self._told = 0
        """How many of the oldest were in the last answer."""

    def __len__(self) -> int:
        """Return how many the sampler is not known to have heard."""
        return len(self._waiting)

    def put(self, verdict: GroupVerdict) -> int:
        """Keep a verdict; return how many were dropped for it."""
        dropped = int(len(self._waiting) == self._waiting.maxlen)
        self._told = max(0, self._told - dropped)
        self._waiting.append(verdict)
        return dropped

    def take(self, limit: int, *, has_heard: bool) -> tuple[GroupVerdict, ...]:
        """Return up to ``limit`` verdicts to tell, oldest first."""
        if has_heard:
            for _ in range(self._told):
                self._waiting.popleft()
        self._told = min(limit, len(self._waiting))
        return tuple(self._waiting[place] for place in range(self._told))
