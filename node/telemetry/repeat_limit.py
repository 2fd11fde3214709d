"""How often the same message is logged before it is only counted; pure.

    first --> passed --the limit within an interval--> counted --the interval is over--> told, passed again

A message is what is constant in it: an event's text, the place in a source file. How many there are is
bounded; past that the one that was heard of least recently is forgotten, with its count told.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

KEYS: Final = 1000
"""Different messages looked after: several times what our code has."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Suppressed(Generic[Key]):
    """How often a message was not logged in an interval that is over."""

    key: Key
    count: int


@dataclass(frozen=True, slots=True)
class Decision(Generic[Key]):
    """What to do with a message, and what was kept back before."""

    passes: bool
    suppressed: tuple[Suppressed[Key], ...] = ()
    """To be told first."""


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
        """Take note of a message at ``now``, seconds; a clock set back ends an interval."""
        told = self._ended(now)
        interval = self._intervals.get(key)
        if interval is None:
            interval = self._intervals[key] = _Interval(now)
        if len(self._intervals) > self._keys:
            told += self._told(*self._intervals.popitem(last=False))
        interval.seen += 1
        if interval.seen <= self._passed:
            return Decision(passes=True, suppressed=told)
        interval.suppressed += 1
        return Decision(passes=False, suppressed=told)

    def rest(self) -> tuple[Suppressed[Key], ...]:
        """Return what was kept back and not told yet, and forget it: the end of the log."""
        told = tuple(t for key, interval in self._intervals.items() for t in self._told(key, interval))
        self._intervals.clear()
        return told

    def _ended(self, now: float) -> tuple[Suppressed[Key], ...]:
        told: tuple[Suppressed[Key], ...] = ()
        while self._intervals:
            key, interval = next(iter(self._intervals.items()))
            if 0 <= now - interval.began_at_s < self._interval_s:
                break
            del self._intervals[key]
            told += self._told(key, interval)
        return told

    def _told(self, key: Key, interval: _Interval) -> tuple[Suppressed[Key], ...]:
        return (Suppressed(key, interval.suppressed),) if interval.suppressed else ()
