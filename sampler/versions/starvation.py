"""Since when newer versions are there and none is taken, and when to say so; pure.

    current --announced--> behind --nothing taken for long--> told, and again after twice as long
       ^                     |                                  |
       '-------- taken ------+----------------------------------'

A version on the way to the head counts: who takes one version after another does not starve.
"""

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from node.weights.planning.link_time import Link

FIRST_TOLD_S: Final = 30.0
"""Of starving: longer than any fetch that nobody needs to hear of."""

_ROUND_TRIPS: Final = 6
"""Of the link: before that nothing is wrong on a far one."""


class DroppedFetch(enum.StrEnum):
    """Why a fetch ended without a version. Closed: the ``reason`` label of dropped fetches."""

    SUPERSEDED = "superseded"
    """Something else is here sooner and leads further."""
    DOUBT = "doubt"
    """What is held may be no version, and is looked at first."""
    LOST = "lost"
    """The link was cut, or the sources do not answer."""
    REFUSED = "refused"
    """The sources do not have it any more, or what they sent cannot be used."""


@dataclass(slots=True)
class Starvation:
    """What happened since the last version was taken. Times are seconds on one clock that only grows."""

    behind_since_s: float | None = None
    dropped: Counter[DroppedFetch] = field(default_factory=Counter)
    _told_after_s: float = 0.0

    def announced(self, *, behind_versions: int, now: float) -> None:
        """Note how far the head is ahead of what is held."""
        if not behind_versions:
            self.took(behind_versions=0, now=now)
        elif self.behind_since_s is None:
            self.behind_since_s = now

    def took(self, *, behind_versions: int, now: float) -> None:
        """Note a version that was taken, and how far the head is ahead of it."""
        self.behind_since_s = now if behind_versions else None
        self.dropped.clear()
        self._told_after_s = 0.0

    def for_s(self, now: float) -> float:
        """Return for how long newer versions have been there and none was taken; 0: there are none."""
        return 0.0 if self.behind_since_s is None else now - self.behind_since_s

    def is_to_be_told(self, link: Link, *, now: float) -> bool:
        """Whether it is time to say so; then not before twice as long."""
        for_s = self.for_s(now)
        if for_s < max(FIRST_TOLD_S, _ROUND_TRIPS * link.round_trip_s, self._told_after_s):
            return False
        self._told_after_s = 2 * for_s
        return True
