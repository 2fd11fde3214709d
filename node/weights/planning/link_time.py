"""Estimates what a round trip over the link to the sources costs, from this peer's own fetches; pure.

The estimate follows a rising round trip at once and a falling one slowly. Taking a far source for a near
one costs a whole fetch; the opposite mistake costs a little waiting.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

FAR_S: Final = 0.5
"""Round trip from which on artifacts are chosen by time: on a nearer link by bytes alone, which the hub's
uplink has to carry for everyone."""

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

    def carried(self, size_bytes: int, *, took_s: float) -> "Link":
        """Return the link after bytes that took so long from the first to the last."""
        if size_bytes < _MEASURABLE_BYTES or took_s < _MEASURABLE_S:
            return self
        measured = size_bytes / took_s
        known = measured if math.isinf(self.bytes_per_s) else self.bytes_per_s
        return replace(self, bytes_per_s=(known + measured) / 2)

    @property
    def artifact_cost_bytes(self) -> int:
        """Bytes the link carries in a round trip; 0 on a near one, and while none was measured."""
        if self.round_trip_s < FAR_S:
            return 0
        return int(min(self.round_trip_s * self.bytes_per_s, _MOST_COST_BYTES))
