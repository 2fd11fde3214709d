"""Generations of slot numbers: a new one begins when an operator accepts a loss; pure.

A backup that is restored does not know which slots were leased after it was taken. Nobody knows what became
of the slots it holds open and of those it never heard of: neither may be leased again. The new generation
counts from a number that no ledger of the run has reached.

    0 ...... open slots ...... lost_from_slot ~~~~ never heard of ~~~~ first_slot ....... new leases
                 |                                     |
               LOST                                   lost: known by their numbers alone

The learner may still hold groups of lost slots, or name them in a record that it repeats: each is passed over
once. If it names the same slot again, that is a double training like any other.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import PlainSerializer, PlainValidator

from node.values.fact import Fact


def _range(ends: Any) -> range:
    match ends:
        case [int(start), int(stop)]:
            return range(start, stop)
        case _:
            raise ValueError("should be the first version and the one after the last")


VersionRange: TypeAlias = Annotated[
    range, PlainValidator(_range), PlainSerializer(lambda versions: [versions.start, versions.stop])
]
"""Contiguous versions, in a fact as [first, last + 1]."""


@dataclass(frozen=True, slots=True)
class Generation(Fact):
    """Slot numbers from ``first_slot`` on, begun because a loss was accepted."""

    kind: ClassVar[str] = "generation"

    number: int
    """Counts from 1; the slots of a new run belong to none."""
    first_slot: int
    lost_from_slot: int
    """Slots from here to ``first_slot`` may have been leased in the time that was lost."""
    begun_at_s: float
    lost_versions: VersionRange | None = None
    """Versions whose records were lost. None: the learner has not reported yet."""

    @property
    def key(self) -> str:
        return str(self.number)


class Generations:
    """Every generation of a run."""

    def __init__(self, generations: Iterable[Generation] = ()) -> None:
        self._by_number = {generation.number: generation for generation in generations}

    def apply(self, generation: Generation) -> None:
        self._by_number[generation.number] = generation

    @property
    def newest(self) -> Generation | None:
        return max(self._by_number.values(), key=lambda one: one.number, default=None)

    @property
    def lost_versions(self) -> list[range]:
        """The versions whose records were lost, as accepted and reported; none of them empty."""
        return [one.lost_versions for one in self._by_number.values() if one.lost_versions]

    @property
    def lost_steps(self) -> int:
        return sum(map(len, self.lost_versions))


class LostSlots:
    def __init__(
        self,
        *,
        open_ones: Iterable[int] = (),
        generations: Iterable[Generation] = (),
        found: Iterable[int] = (),
    ) -> None:
        self._open_ones = set(open_ones)
        self._between = [range(g.lost_from_slot, g.first_slot) for g in generations]
        self._found = set(found)

    def __contains__(self, slot: int) -> bool:
        is_between = any(slot in numbers for numbers in self._between) and slot not in self._found
        return is_between or slot in self._open_ones

    def add(self, slot: int) -> None:
        """Note that nobody knows what became of an open slot."""
        self._open_ones.add(slot)

    def discard(self, slot: int) -> bool:
        """Note that a record has named a lost slot; return whether it was in state LOST before."""
        was_open = slot in self._open_ones
        self._open_ones.discard(slot)
        if any(slot in numbers for numbers in self._between):
            self._found.add(slot)
        return was_open
