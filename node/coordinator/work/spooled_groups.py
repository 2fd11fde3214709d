"""When each group came that waits or is checked, and how large it is; pure."""

from collections.abc import Mapping

from node.coordinator.work.slots import SlotKind, kind_of, slot_and_attempt
from node.rollout import EncodedGroup


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
