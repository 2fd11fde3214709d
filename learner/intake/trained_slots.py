"""Every slot ever trained on, in a few numbers; pure.

Slots are leased in order and almost all of them are trained on, so the set is a few long runs of numbers,
small enough for every checkpoint. A list of the newest ids alone would miss an id that comes back 250
versions later.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

RUNS: Final = 4096
"""Most runs kept; the holes between them are slots under way or abandoned. Beyond, the oldest hole counts as
trained on: a slot that old would be refused, never trained on twice."""


class TrainedSlots:
    """An immutable set of slots; contains a group's id if its slot was trained on."""

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        """Begin with runs of (first, last) slot, both included, ascending and with holes between."""
        self.runs = tuple(runs)

    def __contains__(self, group_id: object) -> bool:
        slot = slot_of(group_id)
        if slot is None:
            return False
        place = bisect_right(self.runs, slot, key=_first) - 1
        return place >= 0 and slot <= self.runs[place][1]

    def with_groups(self, group_ids: Iterable[str]) -> "TrainedSlots":
        """Return the set with the slots of these groups; ids that name no slot are ignored."""
        runs = list(self.runs)
        for slot in map(slot_of, group_ids):
            if slot is not None:
                _add(runs, slot)
        while len(runs) > RUNS:
            runs[:2] = [(runs[0][0], runs[1][1])]
        return TrainedSlots(runs)


def _add(runs: list[tuple[int, int]], slot: int) -> None:
    place = bisect_right(runs, slot, key=_first)
    first = last = slot
    if place > 0 and slot <= runs[place - 1][1]:
        return
    if place < len(runs) and runs[place][0] == slot + 1:
        last = runs.pop(place)[1]
    if place > 0 and runs[place - 1][1] == slot - 1:
        place -= 1
        first = runs.pop(place)[0]
    runs.insert(place, (first, last))


def _first(run: tuple[int, int]) -> int:
    return run[0]


def doubled(handed_in: Mapping[str, Sequence[str]], trained: TrainedSlots) -> list[str]:
    """Return the contributors that hand in another group of a slot that is trained on.

    A slot is leased again once the task's options have changed, and a contributor may still have its older
    group. Of several that are handed in, the first is the one that counts.

    Args:
        handed_in: ids of groups by contributor.
    """
    found: list[str] = []
    slots: set[int | None] = set()
    for contributor, group_ids in handed_in.items():
        own = [slot_of(group_id) for group_id in group_ids]
        is_trained = any(group_id in trained for group_id in group_ids)
        if is_trained or len(set(own)) < len(own) or not slots.isdisjoint(own):
            found.append(contributor)
        else:
            slots.update(own)
    return found


def slot_of(group_id: object) -> int | None:
    """Return the slot that a group's id names; None: it names none."""
    text = str(group_id).partition(".")[0]
    return int(text) if text.isascii() and text.isdecimal() else None
