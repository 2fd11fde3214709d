"""Estimates how long fetches over the link to the sources take, from this peer's own fetches; pure.

    asked --round trip--> manifest --round trip--> first byte --bytes / rate--> complete

The estimate follows a rising round trip at once and a falling one slowly. Taking a far source for a near
one costs a whole fetch; the opposite mistake costs a little waiting.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

_DECAY: Final = 1 / 8
"""Weight of a shorter round trip in the estimate, as in TCP's smoothed round trip."""

_MEASURABLE_BYTES: Final = 256 << 10
_MEASURABLE_S: Final = 0.02
"""Fewer bytes, or a shorter time, are one burst and say nothing about the rate."""

_MOST_COST_BYTES: Final = 1 << 40
"""Assumed capacity of a round trip on a link of unknown rate: so much that only round trips count."""


@dataclass(frozen=True, slots=True)
class Link:
    """Round trip and rate as measured; ``Link()``: nothing measured yet."""

    round_trip_s: float = 0.0
    """Time from a request to its answer, the server's own time included; 0: not measured."""
    bytes_per_s: float = math.inf
    """Rate of all connections together, from the first byte of a fetch to its last."""

    def answered(self, took_s: float) -> "Link":
        """Return the link after an answer that needed no work and took so long."""
        smoothed_s = self.round_trip_s + (took_s - self.round_trip_s) * _DECAY
        return replace(self, round_trip_s=max(took_s, smoothed_s))

    def silent(self, for_s: float) -> "Link":
        """Return the link after no answer came for so long."""
        return replace(self, round_trip_s=max(self.round_trip_s, for_s))

    def carried(self, size_bytes: int, *, took_s: float) -> "Link":
        """Return the link after bytes that took so long from the first to the last."""
        if size_bytes < _MEASURABLE_BYTES or took_s < _MEASURABLE_S:
            return self
        measured = size_bytes / took_s
        known = measured if math.isinf(self.bytes_per_s) else self.bytes_per_s
        return replace(self, bytes_per_s=(known + measured) / 2)

    def seconds(self, size_bytes: int, *, round_trips: int) -> float:
        return round_trips * self.round_trip_s + size_bytes / self.bytes_per_s

    @property
    def artifact_cost_bytes(self) -> int:
        """Bytes the link carries in a round trip; 0: no round trip was measured."""
        if not self.round_trip_s:
            return 0
        return int(min(self.round_trip_s * self.bytes_per_s, _MOST_COST_BYTES))


@dataclass(slots=True)
class FetchProgress:
    """The progress of one fetch. Times are seconds on one monotonic clock."""

    began_at_s: float
    size_bytes: int = 0
    """Size of the artifact; 0 before its manifest arrives."""
    signed_at_s: float | None = None
    """When the manifest arrived."""
    arrived_bytes: int = 0
    first_at_s: float = -math.inf
    last_at_s: float = -math.inf
    """When the first and the last bytes arrived."""

    def signed(self, size_bytes: int, *, now: float) -> None:
        self.signed_at_s, self.size_bytes = now, size_bytes

    def arrived(self, size_bytes: int, *, now: float) -> None:
        if not self.arrived_bytes:
            self.first_at_s = now
        self.arrived_bytes += size_bytes
        self.last_at_s = now

    def silence_s(self, now: float) -> float:
        return now - max(self.began_at_s, self.signed_at_s or 0.0, self.last_at_s)

    def remaining_s(self, link: Link, *, size_bytes: int, now: float) -> float:
        """Return an estimate of the seconds until the fetch is complete.

        An overdue fetch is expected to take as long again as it has been silent. ``size_bytes``, as
        announced, is used until the manifest arrives.
        """
        left_bytes = max(0, (self.size_bytes or size_bytes) - self.arrived_bytes)
        if self.arrived_bytes:
            rate = min(link.bytes_per_s, self.arrived_bytes / max(self.last_at_s - self.first_at_s, 1e-3))
            due_at_s = self.last_at_s + left_bytes / rate
        elif self.signed_at_s is not None:
            due_at_s = self.signed_at_s + link.seconds(left_bytes, round_trips=1)
        else:
            due_at_s = self.began_at_s + link.seconds(left_bytes, round_trips=2)
        return max(due_at_s - now, self.silence_s(now))
