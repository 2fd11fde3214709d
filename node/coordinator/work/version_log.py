"""Which versions were ever announced, when, and with which root; pure.

The store forgets versions that it no longer retains; a group may still name one, and a peer may still hold
it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from node.values.policy import NO_BASE, PolicyVersion

VERSIONS_REMEMBERED: Final = 4096
"""The newest of those announced: as far as the largest staleness bound reaches back."""


@dataclass(frozen=True, slots=True)
class Announced:
    number: int
    root: bytes
    at_s: float
    """Unix seconds on the coordinator's clock when it was seen."""


class VersionLog:
    def __init__(self, announced: Iterable[Announced] = ()) -> None:
        self._entries: dict[int, Announced] = {}
        self.add(announced)

    def __contains__(self, number: int) -> bool:
        return number in self._entries

    def add(self, announced: Iterable[Announced]) -> None:
        """Note versions; those already known stay as they are."""
        for entry in sorted(announced, key=lambda entry: entry.number):
            self._entries.setdefault(entry.number, entry)
        surplus = max(0, len(self._entries) - VERSIONS_REMEMBERED)
        for number in sorted(self._entries)[:surplus]:
            del self._entries[number]

    def root_of(self, number: int) -> bytes | None:
        entry = self._entries.get(number)
        return None if entry is None else entry.root

    def age_s(self, number: int, *, now: float) -> float | None:
        """Return the seconds since a version was announced; None: not in the log."""
        entry = self._entries.get(number)
        return None if entry is None else max(0.0, now - entry.at_s)

    def lag(self, held: PolicyVersion | None, head: PolicyVersion | None, *, now: float) -> tuple[int, float]:
        """Return the versions from ``held`` to the head, and the seconds since a newer one was announced.

        A peer that holds nothing counts as one below version 0.
        """
        number = NO_BASE if held is None else held.number
        if head is None or head.number <= number:
            return 0, 0.0
        newer = (entry.at_s for entry in self._entries.values() if entry.number > number)
        # Announced this moment: not in the log yet.
        return head.number - number, max(0.0, now - min(newer, default=now))
