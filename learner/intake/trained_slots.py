"""Every slot ever trained on, in a few numbers; pure.

Slots are leased in order and almost all of them are trained on, so the set is a few long runs of numbers,
small enough for every checkpoint. A list of the newest ids alone would miss an id that comes back 250
versions later.
"""

from bisect import bisect_right
from collections.abc import Iterable
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
        slot = _slot_of(group_id)
        if slot is None:
            return False
        place = bisect_right(self.runs, slot, key=_first) - 1
        return place >= 0 and slot <= self.runs[place][1]

    def with_groups(self, group_ids: Iterable[str]) -> "TrainedSlots":
        """Return the set with the slots of these groups; ids that name no slot are ignored."""
        runs = list(self.runs)
        for slot in map(_slot_of, group_ids):
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


def _slot_of(group_id: object) -> int | None:
    text = str(group_id).partition(".")[0]
    return int(text) if text.isascii() and text.isdecimal() else None
