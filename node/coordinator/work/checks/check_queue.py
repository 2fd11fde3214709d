"""Groups that wait for a verifier, by sampler: which one is next is decided by ``verifier_places``; pure."""

from collections import OrderedDict
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from node.coordinator.work.slots.slot import Slot, group_id


@dataclass(frozen=True, slots=True)
class Held:
    """A group that waits for a check or is being checked."""

    slot: int
    group_id: str
    sampler_id: str
    since_s: float
    tries: int = field(default=0, compare=False)
    """Verifiers that have left it unanswered."""
    terms_late: int = field(default=0, compare=False)
    """How often it has turned late, at all verifiers together."""
    prompt_index: int = field(default=0, compare=False)
    size_bytes: int = field(default=0, compare=False)

    @classmethod
    def of(cls, slot: Slot, *, size_bytes: int, now: float) -> "Held":
        """Return the group that won a slot."""
        name = group_id(slot.number, slot.winner)
        return cls(
            slot.number, name, slot.winning_holder, now, prompt_index=slot.prompt_index, size_bytes=size_bytes
        )


class CheckQueue:
    """Groups by sampler, each sampler's oldest first."""

    def __init__(self) -> None:
        self._of: dict[str, OrderedDict[str, None]] = {}

    def __contains__(self, held: Held) -> bool:
        return held.group_id in self._of.get(held.sampler_id, ())

    def add(self, held: Held) -> None:
        self._of.setdefault(held.sampler_id, OrderedDict())[held.group_id] = None

    def discard(self, held: Held) -> bool:
        """Remove a group; return whether it was there."""
        of_sampler = self._of.get(held.sampler_id, OrderedDict())
        was_there = held.group_id in of_sampler
        if was_there:
            del of_sampler[held.group_id]
            if not of_sampler:
                del self._of[held.sampler_id]
        return was_there

    def sampler_ids(self, *, but: Container[str]) -> Iterator[str]:
        """Yield the samplers of which a group waits that is not in ``but``."""
        return (name for name, of_sampler in self._of.items() if any(one not in but for one in of_sampler))

    def take(self, sampler_id: str, *, but: Container[str]) -> str:
        """Remove the oldest group of a sampler that is not in ``but``."""
        of_sampler = self._of[sampler_id]
        name = next(one for one in of_sampler if one not in but)
        del of_sampler[name]
        if not of_sampler:
            del self._of[sampler_id]
        return name
