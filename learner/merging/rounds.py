"""Decides when contributions are merged, which, and in which order; pure.

    added --everybody waited for is in, or the quorum is, and its grace time is over--> due, by name
       '---- refused: too many rounds late, or by far larger than the others

A contribution of fewer than ``local_steps`` batches, as before its contributor stops, is merged with the
others and brings no round forward: it counts for no quorum. Else one that hands in little by little would
make the others' contributions late.

A round leads from one merged version to the next.
"""

import math
from collections.abc import Collection, Set
from dataclasses import dataclass
from statistics import median
from typing import Final, Self

from learner.merging.merge_settings import MergeSettings

LEAST_COMPARED: Final = 3
"""Fewer changes do not show which of them is out of line."""

LATE_NAMED: Final = 2
"""Names in a wait, of which the coordinator shows 100 characters."""


@dataclass(frozen=True, slots=True)
class Added:
    """A contribution that waits for its round."""

    contributor: str
    base_version: int
    norm: float
    """Norm of the change, as it was measured here; 0: there is none."""
    is_whole: bool = True
    """Whether it consumed the groups of ``local_steps`` batches."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """A reason not to merge a contribution."""

    outcome: str
    """In a word, for metrics."""
    detail: str


@dataclass(frozen=True, slots=True)
class Awaited:
    """The contributors for whom a merge waits."""

    late: tuple[str, ...] = ()
    """Sorted; none that waits for groups."""
    here: int = 0
    """Contributions that wait with it."""
    expected: int = 0
    """Contributions of all that are waited for, those that are here among them."""

    @classmethod
    def of(cls, waited_for: Set[str], *, here: Set[str], asking: Set[str]) -> Self:
        """Compare whose contributions can come with whose are ``here``, and with who asks for groups."""
        return cls(tuple(sorted(waited_for - here - asking)), len(here), len(waited_for | here))

    @property
    def text(self) -> str:
        """Names and counts, for people; empty: for nobody."""
        some = ", ".join(self.late[:LATE_NAMED]) + (", ..." if self.late[LATE_NAMED:] else "")
        return f"{some} ({self.here} of {self.expected} in)" if self.late else ""


class Rounds:
    """The contributions that are here and in no version. Times are monotonic seconds."""

    def __init__(self, settings: MergeSettings, *, now: float) -> None:
        self._settings = settings
        self._added: dict[str, Added] = {}
        self._quorum_since_s: float | None = None
        self._began_s = now

    def __contains__(self, contributor: str) -> bool:
        return contributor in self._added

    def age_s(self, *, now: float) -> float:
        """Return how long ago the newest merge was."""
        return now - self._began_s

    def add(self, contribution: Added) -> None:
        """Take a contribution in. Raises ValueError: its contributor has one here already."""
        if contribution.contributor in self._added:
            raise ValueError(f"{contribution.contributor} has a contribution here already")
        self._added[contribution.contributor] = contribution

    def remove(self, contributor: str) -> None:
        """Forget a contribution: it was refused."""
        del self._added[contributor]

    def refusals(self, *, version: int) -> dict[str, Unfit]:
        """Return the contributions that cannot be merged into the version after this one, and why."""
        late = {
            one.contributor: Unfit(
                "late", f"it is {rounds} rounds late, and {self._settings.late_rounds} are allowed"
            )
            for one in self._added.values()
            if (rounds := version - one.base_version) > self._settings.late_rounds
        }
        return late | self._out_of_line([one for name, one in self._added.items() if name not in late])

    def due(self, waited_for: Collection[str], *, now: float) -> tuple[str, ...]:
        """Return whose contributions are merged now, sorted; none: nobody's yet."""
        missing = [name for name in waited_for if name not in self._added]
        present = len(self._added) + len(missing)
        whole = sum(one.is_whole for one in self._added.values())
        has_quorum = not missing or whole >= math.ceil(self._settings.quorum * present)
        if not self._added or not has_quorum:
            self._quorum_since_s = None
            return ()
        if self._quorum_since_s is None:
            self._quorum_since_s = now
        if missing and now < self._quorum_since_s + self._settings.grace_s:
            return ()
        return tuple(sorted(self._added))

    def merged(self, contributors: Collection[str], *, now: float) -> None:
        """Begin the next round: these contributions are in a durable version."""
        for name in contributors:
            del self._added[name]
        self._quorum_since_s, self._began_s = None, now

    @property
    def next_event_s(self) -> float | None:
        """When a grace time ends; None: none runs."""
        return None if self._quorum_since_s is None else self._quorum_since_s + self._settings.grace_s

    def _out_of_line(self, added: list[Added]) -> dict[str, Unfit]:
        changes = [one for one in added if one.norm > 0]
        if len(changes) < LEAST_COMPARED:
            return {}
        found = {}
        for one in changes:
            usual = median(other.norm for other in changes if other is not one)
            if one.norm > self._settings.largest_norm_ratio * usual:
                found[one.contributor] = Unfit(
                    "norm",
                    f"its change has norm {one.norm:.3g}, the median of the others is {usual:.3g}, and "
                    f"{self._settings.largest_norm_ratio:g} times that is allowed",
                )
        return found
