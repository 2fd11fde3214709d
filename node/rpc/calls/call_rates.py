"""How often a peer may call: a token bucket for each peer and kind of call; pure.

A call takes a token, one that is refused takes more: refusals are what a peer can cause without any right to
it, and some cost a write to disk. Tokens come back at a steady rate, up to a burst.
"""

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """How often one kind of call may be made."""

    per_s: float
    """Calls a second for as long as the peer likes."""
    burst: float
    """Calls at once after a pause."""
    refused: float = 0.0
    """Tokens that a refused call takes on top of its one."""


class CallRates:
    """The buckets of all callers of a server; past ``most_buckets``, the least recently used is forgotten."""

    def __init__(self, *, most_buckets: int = 65_536) -> None:
        self._most_buckets = most_buckets
        self._buckets: dict[Hashable, tuple[float, float]] = {}
        """Key -> tokens (below 0 after refusals), when they were counted; the least recently used first."""

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: Hashable, rate: Rate, *, now: float) -> float:
        """Take a token and return 0; if there is none, take nothing and return the seconds until there is."""
        tokens = self._tokens(key, rate, now)
        if tokens < 1:
            return (1 - tokens) / rate.per_s
        self._set(key, tokens - 1, now)
        return 0.0

    def reserve(self, key: Hashable, rate: Rate, *, now: float, tokens: int = 1) -> float:
        """Take so many tokens in any case; return the seconds until they are there."""
        left = self._tokens(key, rate, now) - tokens
        self._set(key, left, now)
        return max(0.0, -left / rate.per_s)

    def charge_refusal(self, key: Hashable, rate: Rate, *, now: float) -> None:
        """Take what a refused call costs on top, even if the bucket does not hold it."""
        if rate.refused:
            self._set(key, self._tokens(key, rate, now) - rate.refused, now)

    def _tokens(self, key: Hashable, rate: Rate, now: float) -> float:
        tokens, at = self._buckets.get(key, (rate.burst, now))
        return min(rate.burst, tokens + (now - at) * rate.per_s)

    def _set(self, key: Hashable, tokens: float, now: float) -> None:
        self._buckets.pop(key, None)
        if len(self._buckets) >= self._most_buckets:
            del self._buckets[next(iter(self._buckets))]
        self._buckets[key] = (tokens, now)
