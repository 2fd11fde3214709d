"""Groups from the spool to the learner: how large, since when they wait, and which may go next; pure.

Of the groups that the learner has been sent and has not trained on, newcomers' are at most a part of a batch,
so that no batch moves by more rewards that have hardly been checked; the others wait in the spool. That holds
while a vetted sampler is at work, with leases or with groups to be sent. Without one, as in a run that has no
verifier, newcomers fill whole batches: the run would stand still otherwise.
"""

from collections.abc import Callable, Mapping, Set

from node.coordinator.work.slots.open_slots import OpenSlots
from node.coordinator.work.slots.slot import SlotKind, kind_of, slot_and_attempt
from node.values.groups.rollout import EncodedGroup


class SpooledGroups:
    """The groups of the slots that are not settled."""

    def __init__(self, at_s: Mapping[int, float], sizes: Mapping[int, int]) -> None:
        """Restore: by slot, when a group came (Unix seconds), and its size in bytes."""
        self.at_s = dict(at_s)
        """Read by others; changed here."""
        self._sizes = dict(sizes)
        self.untrained_bytes = sum(map(self._training_bytes, self._sizes))
        """Size of those that are to be trained on."""

    def put(self, group: EncodedGroup) -> None:
        """Note a group that was stored, or takes its own place with rewards."""
        number, _ = slot_and_attempt(group.group_id)
        self.untrained_bytes -= self._training_bytes(number)
        self.at_s.setdefault(number, group.spooled_at_s)
        self._sizes[number] = group.size_bytes
        self.untrained_bytes += self._training_bytes(number)

    def drop(self, slot: int) -> None:
        """Forget a slot's group; that there is none is fine."""
        self.untrained_bytes -= self._training_bytes(slot)
        self.at_s.pop(slot, None)
        self._sizes.pop(slot, None)

    def size_bytes(self, *slots: int) -> int:
        """Return the size of these slots' groups; of a slot without one it is 0."""
        return sum(self._sizes.get(slot, 0) for slot in slots)

    def _training_bytes(self, slot: int) -> int:
        return self._sizes.get(slot, 0) if kind_of(slot) is SlotKind.TRAIN else 0


class NewcomersPart:
    """Which groups wait because newcomers fill their part of the batches."""

    def __init__(self, slots: OpenSlots, vetted: Set[str], *, most: int) -> None:
        """Look at ``slots``; all but ``vetted`` are newcomers, of whom ``most`` groups go at once."""
        self._slots = slots
        self._vetted = vetted
        self._most = most

    @property
    def is_full(self) -> bool:
        """Whether the learner has so many groups of newcomers, while a vetted sampler is at work."""
        if not self._vetted:
            return False
        is_at_work = not self._slots.by_holder.keys().isdisjoint(self._vetted) or any(
            not self._is_newcomers(number) for number in self._slots.undelivered
        )
        return is_at_work and self._most <= sum(map(self._is_newcomers, self._slots.delivered()))

    def waiting(self) -> int:
        """Count the groups that wait for it."""
        return sum(map(self._is_newcomers, self._slots.undelivered)) if self.is_full else 0

    def held_with(self, is_held: Callable[[int], bool]) -> Callable[[int], bool]:
        """Return whether a slot's group waits, for whatever ``is_held`` says or for this."""
        if not self.is_full:
            return is_held
        return lambda number: is_held(number) or self._is_newcomers(number)

    def _is_newcomers(self, number: int) -> bool:
        return self._slots.by_number[number].winning_holder not in self._vetted
