"""A limit on how often the same message is logged before it is only counted; pure.

    first --> passed --limit reached--> counted --the interval is over--> count reported, passed again

A message is identified by what is constant in it: an event's text, a place in a source file. The number of
messages is bounded: past it, the one whose interval began first is forgotten and its count reported.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

KEYS: Final = 1000
"""Messages tracked at once: several times as many as our code has."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Suppressed(Generic[Key]):
    """A message and how often it was not logged in an interval that is over."""

    key: Key
    count: int


@dataclass(frozen=True, slots=True)
class Decision(Generic[Key]):
    """Whether to log a message, and the counts to report before it."""

    passes: bool
    suppressed: tuple[Suppressed[Key], ...] = ()


@dataclass(slots=True)
class _Interval:
    began_at_s: float
    seen: int = 0
    suppressed: int = 0


class RepeatLimit(Generic[Key]):
    """Passes the first ``passed`` of each message per interval, and counts the others."""

    def __init__(self, *, passed: int, interval_s: float, keys: int = KEYS) -> None:
        self._passed = passed
        self._interval_s = interval_s
        self._keys = keys
        # In the order in which their intervals began: only the first can be over.
        self._intervals: OrderedDict[Key, _Interval] = OrderedDict()

    def decide(self, key: Key, *, now: float) -> Decision[Key]:
        """Count a message at ``now``, seconds, and decide on it; a clock set back ends an interval."""
        suppressed = self._ended(now)
        interval = self._intervals.get(key)
        if interval is None:
            interval = self._intervals[key] = _Interval(now)
        if len(self._intervals) > self._keys:
            suppressed += self._counted(*self._intervals.popitem(last=False))
        interval.seen += 1
        if interval.seen <= self._passed:
            return Decision(passes=True, suppressed=suppressed)
        interval.suppressed += 1
        return Decision(passes=False, suppressed=suppressed)

    def flush(self) -> tuple[Suppressed[Key], ...]:
        """Return and forget all counts that were not reported yet: the log ends."""
        rest = tuple(s for key, interval in self._intervals.items() for s in self._counted(key, interval))
        self._intervals.clear()
        return rest

    def _ended(self, now: float) -> tuple[Suppressed[Key], ...]:
        ended: tuple[Suppressed[Key], ...] = ()
        while self._intervals:
            key, interval = next(iter(self._intervals.items()))
            if 0 <= now - interval.began_at_s < self._interval_s:
                break
            del self._intervals[key]
            ended += self._counted(key, interval)
        return ended

    def _counted(self, key: Key, interval: _Interval) -> tuple[Suppressed[Key], ...]:
        return (Suppressed(key, interval.suppressed),) if interval.suppressed else ()
