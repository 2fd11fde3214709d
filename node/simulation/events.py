"""Virtual time: what happens when, and links that their transfers share equally."""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field


class Events:
    """Callbacks in the order of their times; those of one time in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (max(time_s, self.now), self._count, event))

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        self.at(self.now + delay_s, event)

    def run(self, until_s: float) -> None:
        while self._heap and self._heap[0][0] <= until_s:
            self.now, _, event = heapq.heappop(self._heap)
            event()
        self.now = until_s


@dataclass(slots=True)
class Link:
    """A link in one direction, whose transfers get equal parts of its rate.

    A transfer that could go no faster than its other end occupies its part here until it would have been
    through, and arrives when both ends have carried it: the other transfers get that part a little late.
    """

    events: Events
    bytes_per_s: float
    carried_bytes: float = 0.0
    busy_s: float = 0.0
    _transfers: list[tuple[float, int, float, Callable[[], None]]] = field(default_factory=list)
    """(served bytes at its end, number, earliest time, what follows), a heap."""
    _served_bytes: float = 0.0
    """To each transfer since the beginning."""
    _at_s: float = 0.0
    _count: int = 0

    def send(self, size_bytes: float, then: Callable[[], None], *, other_end: float = math.inf) -> None:
        """Carry so many bytes, which the other end takes at ``other_end`` bytes per second at most."""
        self.settle()
        self._count += 1
        self.carried_bytes += size_bytes
        earliest_s = self.events.now + size_bytes / other_end
        heapq.heappush(self._transfers, (self._served_bytes + size_bytes, self._count, earliest_s, then))
        self._wake_at_next_end()

    def settle(self) -> None:
        """Count what was carried until now."""
        now, transfers = self.events.now, len(self._transfers)
        if transfers:
            self._served_bytes += (now - self._at_s) * self.bytes_per_s / transfers
            self.busy_s += now - self._at_s
        self._at_s = now

    def _wake_at_next_end(self) -> None:
        self._count += 1
        left_bytes = max(0.0, self._transfers[0][0] - self._served_bytes)
        current = self._count
        self.events.after(
            left_bytes * len(self._transfers) / self.bytes_per_s,
            lambda: self._end_first() if current == self._count else None,
        )

    def _end_first(self) -> None:
        self.settle()
        ends, _, earliest_s, then = heapq.heappop(self._transfers)
        self._served_bytes = max(self._served_bytes, ends)
        if self._transfers:
            self._wake_at_next_end()
        self.events.at(earliest_s, then)
