"""For how long newer versions have been available and none was taken, and when to log it; pure."""

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from node.weights.planning.link_time import Link

FIRST_LOGGED_S: Final = 30.0
"""Longer than an ordinary fetch takes."""

_ROUND_TRIPS: Final = 6
"""Before that many round trips nothing is wrong on a long link."""


class DroppedFetch(enum.StrEnum):
    """Why a fetch ended without a version. Closed: the ``reason`` label of dropped fetches."""

    SUPERSEDED = "superseded"
    """Something else arrives sooner and leads further."""
    DOUBT = "doubt"
    """The held version may be damaged and is checked first."""
    LOST = "lost"
    """The connection was lost, or the sources do not answer."""
    REFUSED = "refused"
    """The sources no longer have it, or what they sent cannot be used."""


@dataclass(slots=True)
class Starvation:
    """Events since the last version was taken. Times are in seconds of a monotonic clock."""

    behind_since_s: float | None = None
    dropped: Counter[DroppedFetch] = field(default_factory=Counter)
    _logged_after_s: float = 0.0

    def announced(self, *, behind_versions: int, now: float) -> None:
        """Note how far the head is ahead of the held version."""
        if not behind_versions:
            self.took(behind_versions=0, now=now)
        elif self.behind_since_s is None:
            self.behind_since_s = now

    def took(self, *, behind_versions: int, now: float) -> None:
        """Note a version that was taken, on the way to the head or the head itself."""
        self.behind_since_s = now if behind_versions else None
        self.dropped.clear()
        self._logged_after_s = 0.0

    def for_s(self, now: float) -> float:
        """Return for how long newer versions have been available and none was taken; 0: there are none."""
        return 0.0 if self.behind_since_s is None else now - self.behind_since_s

    @property
    def fix(self) -> str:
        """Return what to do about it, by the fate of most fetches."""
        refused = self.dropped[DroppedFetch.REFUSED]
        if 2 * refused > sum(self.dropped.values()):
            return f"the link is not at fault: {refused} fetches were refused; 'artifact not usable' says why"
        return "put a relay near this sampler, give it a faster link, or make steps longer"

    def is_log_due(self, link: Link, *, now: float) -> bool:
        """Whether to log it now; if so, not again before twice as long."""
        for_s = self.for_s(now)
        if for_s < max(FIRST_LOGGED_S, _ROUND_TRIPS * link.round_trip_s, self._logged_after_s):
            return False
        self._logged_after_s = 2 * for_s
        return True
