"""How to keep near a head that moves on while one fetches: over any link, however long; pure.

    keeps up     by the cheapest artifacts in bytes the gap at least halves: fetch those, one after the other
    far          it does not: every artifact costs the round trip of asking. Let the source choose the
                 quickest way, when the question reaches it, and send the artifact with its manifest
    finish       a fetch under way goes on, unless its bytes are not needed any more and something else
                 would be here in half the time it still takes; and always after MOST_DROPS in a row

What is held therefore never stands still while the head moves. Whatever the round trip R, the version
period P, the distance D between keyframes and the time K to fetch one, a version taken is at most
D + (K + R) / P behind the head, and at most MOST_DROPS fetches are begun in vain before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from node.policy import Announcement, Artifact
from node.weights.planning.link_time import Link, Progress

ROUND_TRIPS: Final = 2
"""Of a fetch that was not asked for in advance: manifest, frames."""

LEAST_PATIENCE_S: Final = 1.0

_HALF: Final = 0.5

_PACE_WEIGHT: Final = 0.25
"""Of the newest announcement in the mean period of the head."""

MOST_DROPS: Final = 3
"""Fetches dropped in a row. Each was to halve the time until the next version; where the link is not as
measured they did not, and what is begun then is finished."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the head moves, by the learner's clock."""

    number: int = 0
    published_at_s: float = 0.0
    version_s: float | None = None
    """Seconds between two versions lately; None: not known."""

    def announced(self, announcement: Announcement) -> "Pace":
        """Take an announcement in."""
        number, at_s = announcement.head.number, announcement.published_at_s
        if number <= self.number or at_s <= self.published_at_s:
            return self
        if not self.published_at_s:
            return Pace(number, at_s)
        measured = (at_s - self.published_at_s) / (number - self.number)
        known = measured if self.version_s is None else self.version_s
        return Pace(number, at_s, known + _PACE_WEIGHT * (measured - known))


@dataclass(frozen=True, slots=True)
class Pursuit:
    """What is known of head and link, and how often a fetch was dropped since something was taken."""

    pace: Pace = field(default_factory=Pace)
    link: Link = field(default_factory=Link)
    drops_in_a_row: int = 0

    def measured(self, link: Link) -> "Pursuit":
        """Take what is known of the link now."""
        return replace(self, link=link)

    def announced(self, announcement: Announcement) -> "Pursuit":
        """Take an announcement in."""
        return replace(self, pace=self.pace.announced(announcement))

    def dropped(self) -> "Pursuit":
        """Note a fetch that was begun in vain."""
        return replace(self, drops_in_a_row=self.drops_in_a_row + 1)

    def took(self) -> "Pursuit":
        """Note a version that was taken."""
        return replace(self, drops_in_a_row=0)

    @property
    def patience_s(self) -> float:
        """How long to wait for what a source chooses to send, before it is asked for by name."""
        return LEAST_PATIENCE_S + ROUND_TRIPS * self.link.round_trip_s

    def distance(self, behind_versions: int, *, bound_versions: int) -> str:
        """Return, for people, how far from the head the link keeps a sampler; 100 characters at most."""
        moved = 0.0 if not self.pace.version_s else self.link.round_trip_s / self.pace.version_s
        return (
            f"{behind_versions} behind, {moved:.3g} more in a round trip of {self.link.round_trip_s:.2g} s, "
            f"bound {bound_versions}"
        )

    def keeps_up(self, path: Sequence[Artifact], *, behind_versions: int) -> bool:
        """Whether fetching ``path``, one by one, at least halves the distance to the head."""
        if self.pace.version_s is None:
            return True
        took_s = sum(self.link.seconds(artifact.size_bytes, round_trips=ROUND_TRIPS) for artifact in path)
        return took_s <= _HALF * behind_versions * self.pace.version_s

    def is_worth_finishing(
        self, progress: Progress, artifact: Artifact, *, instead: Artifact | None, now: float
    ) -> bool:
        """Whether a fetch whose bytes the cheapest way does not need any more is finished all the same.

        Args:
            progress: of the fetch.
            artifact: which it fetches.
            instead: what would be fetched in its place.
            now: on the clock of ``progress``.
        """
        if instead is None or not self.link.round_trip_s or self.drops_in_a_row >= MOST_DROPS:
            return True
        instead_s = self.link.seconds(instead.size_bytes, round_trips=ROUND_TRIPS)
        remaining_s = progress.remaining_s(self.link, size_bytes=artifact.size_bytes, now=now)
        return instead_s > _HALF * remaining_s
