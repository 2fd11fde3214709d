"""How much of what was to be checked has been, by sampler: whether checking is thin; pure.

Shares are of a sampler's latest groups: older ones fade. In memory only.
"""

from dataclasses import dataclass, field
from typing import Final

LATEST_GROUPS: Final = 256
LEAST_DRAWN: Final = 8
"""Groups that must have been drawn before a sampler's checks are called thin."""

THIN_PART: Final = 0.5
"""Part of those drawn; with less than that checked, checking is thin."""


@dataclass(frozen=True, slots=True)
class ThinlyChecked:
    sampler_id: str
    checked_share: float
    """Part of its latest groups."""
    drawn_share: float
    """As the run asks for."""

    def __str__(self) -> str:
        return (
            f"{self.sampler_id} ({self.checked_share:.1%} of its groups in place of {self.drawn_share:.1%})"
        )


@dataclass(slots=True)
class _Counts:
    groups: float = 0.0
    drawn: float = 0.0
    checked: float = 0.0


@dataclass(slots=True)
class CheckTally:
    _of: dict[str, _Counts] = field(default_factory=dict)

    def note_group(self, sampler_id: str, *, is_drawn: bool) -> None:
        counts, kept = self._of.setdefault(sampler_id, _Counts()), 1.0 - 1.0 / LATEST_GROUPS
        counts.groups = counts.groups * kept + 1.0
        counts.drawn = counts.drawn * kept + is_drawn
        counts.checked *= kept

    def note_checked(self, sampler_id: str) -> None:
        if (counts := self._of.get(sampler_id)) is not None:
            counts.checked += 1.0

    def thin(self) -> tuple[ThinlyChecked, ...]:
        """Return the samplers of whose drawn groups less than ``THIN_PART`` were checked, the worst first."""
        found = [
            ThinlyChecked(name, counts.checked / counts.groups, counts.drawn / counts.groups)
            for name, counts in self._of.items()
            if counts.drawn >= LEAST_DRAWN and counts.checked < THIN_PART * counts.drawn
        ]
        return tuple(sorted(found, key=lambda one: (one.checked_share / one.drawn_share, one.sampler_id)))
