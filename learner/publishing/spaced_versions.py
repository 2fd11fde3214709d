"""Which old versions to keep so that a rollback reaches far back with few of them; pure.

age in versions   1 .. every     every .. 2 every    2 every .. 4 every    4 every .. 8 every   ...
kept              not asked      one                 one                   one
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spacing:
    """One version for each doubling of the age."""

    every: int
    """Age in versions from which on they are thinned out; at least 1."""
    most: int
    """Versions to keep, the newest of those that the rule names; 0: none."""

    def chosen(self, available: Iterable[int]) -> frozenset[int]:
        """Return the versions to keep, of those that can be had; the newest of them is the head.

        At an age of ``width = every * 2 ** k`` to twice that, a version is kept if there is none before it
        between the two multiples of ``width`` around it. A wider part is made of two narrower ones, so what
        is kept at a greater age was kept before.
        """
        numbers = sorted(set(available))
        kept = []
        for at, version in enumerate(numbers):
            if (age := numbers[-1] - version) >= self.every:
                width = self.every << ((age // self.every).bit_length() - 1)
                if at == 0 or numbers[at - 1] // width != version // width:
                    kept.append(version)
        return frozenset(kept[-self.most :] if self.most else ())
