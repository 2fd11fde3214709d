"""Decides how to follow a head that moves while one fetches, over any link, however long; pure.

    keeps up     fetching the cheapest artifacts one by one at least halves the distance to the head: do so
    far          it does not, because every artifact costs a round trip of asking. Let the source choose the
                 cheapest path when the request reaches it, and send the artifact with its manifest
    finish       a fetch under way continues, unless its bytes are no longer needed and something else
                 would be here in half the time it still takes; and always after MOST_DROPS in a row

So what is held never stands still while the head moves. With a round trip R, version period P, distance D
between keyframes and time K to fetch one, a version taken is at most D + (K + R) / P behind the head, and at
most MOST_DROPS fetches before it were in vain.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from node.policy import Announcement, Artifact
from node.weights.planning.link_time import FetchProgress, Link

ROUND_TRIPS: Final = 2
"""Round trips of a fetch that was not prefetched: manifest, frames."""

LEAST_PATIENCE_S: Final = 1.0

_HALF: Final = 0.5

_PACE_WEIGHT: Final = 0.25
"""Weight of the newest announcement in the mean period of the head."""

MOST_DROPS: Final = 3
"""Fetches dropped in a row. Each drop should halve the time until the next version. If three did not, the
link is not as measured, and the next fetch is finished."""


@dataclass(slots=True)
class Pursuit:
    """Knowledge of the head and the link."""

    link: Link = field(default_factory=Link)
    version_s: float | None = None
    """Recent mean of the seconds between two versions, by the learner's clock; None: not known."""
    drops_in_a_row: int = 0
    """Fetches dropped since a version was taken."""
    _newest: tuple[int, float] = (0, 0.0)
    """Number of the newest head that tells the pace, and when it was published."""

    def announced(self, announcement: Announcement) -> None:
        """Take the pace of the head from an announcement."""
        (known_number, known_at_s), number = self._newest, announcement.head.number
        at_s = announcement.published_at_s
        if number <= known_number or at_s <= known_at_s:
            return
        self._newest = number, at_s
        if known_at_s:
            measured = (at_s - known_at_s) / (number - known_number)
            known = measured if self.version_s is None else self.version_s
            self.version_s = known + _PACE_WEIGHT * (measured - known)

    @property
    def patience_s(self) -> float:
        """How long to wait for what a source chooses to send before asking for an artifact by name."""
        return LEAST_PATIENCE_S + ROUND_TRIPS * self.link.round_trip_s

    def distance(self, behind_versions: int, *, bound_versions: int) -> str:
        """Describe, in at most 100 characters, how far from the head the link keeps a sampler."""
        moved = 0.0 if not self.version_s else self.link.round_trip_s / self.version_s
        return (
            f"{behind_versions} behind, {moved:.3g} more in a round trip of {self.link.round_trip_s:.2g} s, "
            f"bound {bound_versions}"
        )

    def keeps_up(self, path: Sequence[Artifact], *, behind_versions: int) -> bool:
        """Return whether fetching ``path`` one by one at least halves the distance to the head."""
        if self.version_s is None:
            return True
        took_s = sum(self.link.seconds(artifact.size_bytes, round_trips=ROUND_TRIPS) for artifact in path)
        return took_s <= _HALF * behind_versions * self.version_s

    def is_worth_finishing(
        self, progress: FetchProgress, artifact: Artifact, *, instead: Artifact | None, now: float
    ) -> bool:
        """Return whether to finish a fetch whose bytes the cheapest path no longer needs.

        ``instead`` would be fetched in its place; ``now`` is on the clock of ``progress``.
        """
        if instead is None or not self.link.round_trip_s or self.drops_in_a_row >= MOST_DROPS:
            return True
        instead_s = self.link.seconds(instead.size_bytes, round_trips=ROUND_TRIPS)
        remaining_s = progress.remaining_s(self.link, size_bytes=artifact.size_bytes, now=now)
        return instead_s > _HALF * remaining_s
