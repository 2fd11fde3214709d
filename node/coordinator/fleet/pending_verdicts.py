"""Verdicts that samplers have not heard: repeated until they have; pure.

put --> waiting --take--> told --the next heartbeat of the same stream--> gone
           ^               |
           '--- a new stream: the answer may have been lost with the one before ---'
"""

from collections import deque
from collections.abc import Set

from node.verdict import GroupVerdict


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
