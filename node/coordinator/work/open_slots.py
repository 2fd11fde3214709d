"""The slots that are not settled, and the orders in which they are looked for; pure.

    available, sound      lowest number first: leased before new ones
    available, suspect    the same, of slots that had a fault: they wait, and fill no grant
    leased                by holder, and by deadline
    undelivered           lowest number first: the groups that the learner is to be sent

Each change and each look-up costs O(log n) of the open slots. What a decision finds stays where it is until
``put`` says what became of it: a decision whose transaction fails has changed nothing.
"""

import heapq
from collections.abc import Iterator, Mapping
from typing import Final

from node.coordinator.work.slots import UNTRAINED, Slot, SlotState

_SPARE: Final = 64
"""Removed entries that a heap may keep besides as many as it has members; then it is made anew."""


class OpenSlots:
    """Slots by number, and where each has its place."""

    def __init__(self) -> None:
        self.by_number: dict[int, Slot] = {}
        self.sound = LowestFirst()
        self.suspect = LowestFirst()
        self.untrained: set[int] = set()
        self.undelivered = LowestFirst()
        """Those of ``untrained`` that the learner's stream has not been given."""
        self._held: dict[str, set[int]] = {}
        self._proven: set[str] = set()
        self.newcomers_leases = 0
        """Held by all samplers together that have never delivered a group."""

    def prove(self, holder: str) -> None:
        """Note that a sampler has delivered a group."""
        if holder not in self._proven:
            self._proven.add(holder)
            self.newcomers_leases -= self.running(holder)

    def held_by(self, holder: str) -> frozenset[int]:
        """Return the slots that a sampler holds leases on."""
        return frozenset(self._held.get(holder, ()))

    def running(self, holder: str) -> int:
        """Count the leases of a sampler."""
        return len(self._held.get(holder, ()))

    @property
    def running_by_holder(self) -> Mapping[str, int]:
        """Count the leases of each sampler that has any."""
        return {holder: len(numbers) for holder, numbers in self._held.items()}

    def put(self, slot: Slot) -> Slot | None:
        """Give a slot the place of its state; return what it was."""
        before = self.pop(slot.number)
        self.by_number[slot.number] = slot
        if slot.state is SlotState.AVAILABLE:
            (self.suspect if slot.had_fault() else self.sound).add(slot.number)
        elif slot.lease is not None:
            self._held.setdefault(slot.lease.holder, set()).add(slot.number)
            self.newcomers_leases += slot.lease.holder not in self._proven
        elif slot.state in UNTRAINED:
            self.untrained.add(slot.number)
            if before is None or before.state not in UNTRAINED:
                self.undelivered.add(slot.number)
        return before

    def pop(self, number: int) -> Slot | None:
        """Remove a slot; return what it was, None where it was not open."""
        slot = self.by_number.pop(number, None)
        if slot is None:
            return None
        self.sound.discard(number)
        self.suspect.discard(number)
        self.untrained.discard(number)
        self.undelivered.discard(number)
        if slot.lease is not None:
            held = self._held[slot.lease.holder]
            held.discard(number)
            self.newcomers_leases -= slot.lease.holder not in self._proven
            if not held:
                del self._held[slot.lease.holder]
        return slot


class LowestFirst:
    """A set of numbers that is iterated from the lowest on, without looking at the rest."""

    def __init__(self) -> None:
        self._members: set[int] = set()
        self._heap: list[int] = []
        """Every member, and removed ones until they come up; a number may be in it twice."""

    def __len__(self) -> int:
        return len(self._members)

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


class Deadlines:
    """When each lease ends. Extending one, as every heartbeat does for many, costs O(1)."""

    def __init__(self) -> None:
        self._at_s: dict[int, float] = {}
        self._queued_s: dict[int, float] = {}
        """The time under which a lease stands in the heap: its deadline, or one before it."""
        self._heap: list[tuple[float, int]] = []

    def set(self, number: int, at_s: float) -> None:
        """Set the deadline of a slot's lease, also to another one."""
        self._at_s[number] = at_s
        if at_s < self._queued_s.get(number, float("inf")):
            self._queue(number, at_s)

    def discard(self, number: int) -> None:
        self._at_s.pop(number, None)
        self._queued_s.pop(number, None)
        if len(self._heap) > 2 * len(self._at_s) + _SPARE:
            self._heap = [(at_s, number) for number, at_s in self._queued_s.items()]
            heapq.heapify(self._heap)

    def due(self, now: float) -> list[int]:
        """Return the slots whose deadlines have passed, lowest first."""
        numbers = []
        while self._heap and self._heap[0][0] <= now:
            queued_s, number = heapq.heappop(self._heap)
            if self._queued_s.get(number) != queued_s:
                continue  # of a lease that has ended
            del self._queued_s[number]
            if self._at_s[number] <= now:
                numbers.append(number)
            else:
                self._queue(number, self._at_s[number])
        for number in numbers:  # until they are discarded: the transaction may fail
            self._queue(number, self._at_s[number])
        return sorted(numbers)

    def _queue(self, number: int, at_s: float) -> None:
        self._queued_s[number] = at_s
        heapq.heappush(self._heap, (at_s, number))
