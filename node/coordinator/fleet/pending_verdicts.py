"""Verdicts on their way to one sampler: told again until it has heard them; pure.

put --> waiting --take--> told --the next heartbeat of the same stream--> gone
           ^               |
           '--- a new stream: the answer may have been lost with the one before ---'
"""

from collections import deque

from node.rollout import GroupVerdict


class Outbox:
    """At most ``capacity`` verdicts; beyond, the oldest go."""

    def __init__(self, *, capacity: int) -> None:
        self._waiting: deque[GroupVerdict] = deque(maxlen=capacity)
        self._told = 0
        """How many of the oldest were in the answer given last."""

    def __len__(self) -> int:
        """Give how many the sampler is not known to have heard."""
        return len(self._waiting)

    def put(self, judgement: GroupVerdict) -> int:
        """Keep a verdict; give how many were dropped for it."""
        dropped = int(len(self._waiting) == self._waiting.maxlen)
        self._told = max(0, self._told - dropped)
        self._waiting.append(judgement)
        return dropped

    def take(self, limit: int, *, has_heard: bool) -> tuple[GroupVerdict, ...]:
        """Give up to ``limit`` verdicts to tell, oldest first.

        Args:
            limit: of one answer.
            has_heard: whether the sampler has the answer before this one.
        """
        if has_heard:
            for _ in range(self._told):
                self._waiting.popleft()
        self._told = min(limit, len(self._waiting))
        return tuple(self._waiting[place] for place in range(self._told))
