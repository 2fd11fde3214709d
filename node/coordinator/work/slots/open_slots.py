"""The slots that are not settled, and the orders in which they are looked for; pure.

    available, sound      lowest number first: leased before new ones
    available, suspect    the same, of slots that had a fault: they wait, and fill no grant
    leased                by holder
    undelivered           lowest number first: the groups that the learner is to be sent
    ungraded              those that a verifier grades first
    held-out              available ones, answered ones and leases, apart from those of training

Each change and each look-up costs O(log n) of the open slots. What a decision finds stays where it is until
``put`` says what became of it: a decision whose transaction fails has changed nothing.
"""

import heapq
from collections.abc import Callable, Collection, Iterator
from typing import Final

from node.coordinator.work.slots.slot import DELIVERABLE, UNTRAINED, Slot, SlotKind, SlotState, group_id

_SPARE: Final = 64
"""Removed entries that a heap may keep besides as many as it has members; then it is made anew."""


class OpenSlots:
    def __init__(self) -> None:
        self.by_number: dict[int, Slot] = {}
        self.sound = LowestFirst()
        self.suspect = LowestFirst()
        self.untrained: set[int] = set()
        self.undelivered = LowestFirst()
        """Slots of ``untrained`` that have not been sent to the learner's stream."""
        self.ungraded: set[int] = set()
        self.by_holder: dict[str, set[int]] = {}
        """Sampler -> the slots of training that it holds leases on."""
        self.held_out = LowestFirst()
        """Held-out slots that are available."""
        self.answered: set[int] = set()
        """Held-out slots with a group that does not count yet."""
        self._held_out_by_holder: dict[str, set[int]] = {}
        self._proven: set[str] = set()
        self.newcomers_leases = 0
        """Held by all samplers together that have never delivered a group."""

    def delivered(self) -> set[int]:
        """Return the slots of ``untrained`` that have been sent to the learner's stream."""
        return self.undelivered.missing(self.untrained) - self.ungraded

    def answered_slots(self) -> list[Slot]:
        """Return the held-out slots whose group does not count yet, lowest number first."""
        return [self.by_number[number] for number in sorted(self.answered)]

    def untrained_slots(self) -> list[Slot]:
        """Return the slots whose group waits for training, oldest first."""
        return [self.by_number[number] for number in sorted(self.untrained)]

    def deliver_anew(self, held: Collection[str]) -> None:
        """Count every group that waits for training as undelivered, except those that the learner holds."""
        for slot in self.untrained_slots():
            if slot.state is SlotState.UNGRADED:
                continue
            is_held = group_id(slot.number, slot.winner) in held
            (self.undelivered.discard if is_held else self.undelivered.add)(slot.number)

    def next_undelivered(self, is_held: Callable[[int], bool] = lambda _: False) -> Slot | None:
        """Return the oldest slot whose group was not delivered, and count it as delivered; None: none.

        Groups that are held back are passed over.
        """
        number = next((number for number in self.undelivered if not is_held(number)), None)
        if number is None:
            return None
        self.undelivered.discard(number)
        return self.by_number[number]

    def unsent(self, number: int) -> Slot | None:
        """Return a slot whose group was neither sent to the learner nor counted in a score; else None."""
        here = (self.undelivered, self.ungraded, self.answered)
        return self.by_number[number] if any(number in numbers for numbers in here) else None

    def prove(self, holder: str) -> None:
        if holder not in self._proven:
            self._proven.add(holder)
            self.newcomers_leases -= self.running(holder)

    def held_by(self, holder: str) -> frozenset[int]:
        """Return the slots of either kind that a sampler holds leases on."""
        return frozenset((*self.by_holder.get(holder, ()), *self._held_out_by_holder.get(holder, ())))

    def running(self, holder: str, kind: SlotKind = SlotKind.TRAIN) -> int:
        return len(self._leases(kind).get(holder, ()))

    def put(self, slot: Slot) -> Slot | None:
        """Put a slot where its state belongs; return what it was."""
        before = self.pop(slot.number)
        self.by_number[slot.number] = slot
        if slot.lease is not None:
            self._leases(slot.kind).setdefault(slot.lease.holder, set()).add(slot.number)
            self.newcomers_leases += self._is_newcomers(slot)
        elif slot.kind is SlotKind.HELD_OUT:
            if slot.state is SlotState.AVAILABLE:
                self.held_out.add(slot.number)
            else:
                self.answered.add(slot.number)
        elif slot.state is SlotState.AVAILABLE:
            (self.suspect if slot.had_fault() else self.sound).add(slot.number)
        elif slot.state in UNTRAINED:
            self.untrained.add(slot.number)
            if slot.state is SlotState.UNGRADED:
                self.ungraded.add(slot.number)
            elif before is None or before.state not in DELIVERABLE:
                self.undelivered.add(slot.number)
        return before

    def pop(self, number: int) -> Slot | None:
        """Remove a slot; return what it was, None where it was not open."""
        slot = self.by_number.pop(number, None)
        if slot is None:
            return None
        if slot.lease is not None:
            leases = self._leases(slot.kind)
            leases[slot.lease.holder].discard(number)
            self.newcomers_leases -= self._is_newcomers(slot)
            if not leases[slot.lease.holder]:
                del leases[slot.lease.holder]
            return slot
        self.sound.discard(number)
        self.suspect.discard(number)
        self.untrained.discard(number)
        self.ungraded.discard(number)
        self.undelivered.discard(number)
        self.held_out.discard(number)
        self.answered.discard(number)
        return slot

    def _leases(self, kind: SlotKind) -> dict[str, set[int]]:
        return self.by_holder if kind is SlotKind.TRAIN else self._held_out_by_holder

    def _is_newcomers(self, slot: Slot) -> bool:
        assert slot.lease is not None
        return slot.kind is SlotKind.TRAIN and slot.lease.holder not in self._proven


class LowestFirst:
    """A set of numbers that is iterated from the lowest on, without looking at the rest."""

    def __init__(self) -> None:
        self._members: set[int] = set()
        self._heap: list[int] = []
        """Every member, and removed ones until they come up; a number may be in it twice."""

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, number: int) -> bool:
        return number in self._members

    def missing(self, numbers: set[int]) -> set[int]:
        """Return those of the numbers that are not in the set."""
        return numbers - self._members

    def add(self, number: int) -> None:
        if number not in self._members:
            self._members.add(number)
            heapq.heappush(self._heap, number)

    def discard(self, number: int) -> None:
        self._members.discard(number)
        while self._heap and self._heap[0] not in self._members:
            heapq.heappop(self._heap)
        if len(self._heap) > 2 * len(self._members) + _SPARE:
            self._heap = sorted(self._members)

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers in order; the set must not change meanwhile."""
        heap, last = self._heap, -1
        # The lowest number not yet yielded is a child of one that was: k of n numbers cost O(k log k).
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            number, place = heapq.heappop(frontier)
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(heap):
                    heapq.heappush(frontier, (heap[child], child))
            if number != last and number in self._members:
                last = number
                yield number
