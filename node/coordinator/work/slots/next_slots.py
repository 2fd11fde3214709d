"""Which slots a sampler is leased: those up for another attempt, oldest first, then new ones; pure."""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Final

from node.coordinator.work.slots.bad_prompts import Aside
from node.coordinator.work.slots.open_slots import OpenSlots
from node.coordinator.work.slots.prompt_order import PromptOrder
from node.coordinator.work.slots.slot import Slot, SlotState
from node.coordinator.work.slots.slot_times import SlotTimes

SUSPECTS_PER_GRANT: Final = 4
"""One lease in so many of a grant, or one, may be on a slot that had a fault: they must not fill it."""

SUSPECTS_LOOKED_AT: Final = 64
"""Slots that had a fault and are considered for one grant, lowest first. Those that wait are passed over, for
seconds; where more wait, the ones behind them wait as well."""

SKIPS_PER_GRANT: Final = 1024
"""Slots passed over for one grant. Where more in a row have prompts aside, the next request goes on."""

LEFT_TO_OTHERS_PER_GRANT: Final = 16
"""Slots left to other samplers for one grant, because their prompts are kept from this one: few, so that a
sampler that has failed every prompt does not spend an epoch."""


def up_again(
    slots: OpenSlots,
    times: SlotTimes,
    holder: str,
    wanted: int,
    may_have: Callable[[int], bool],
    *,
    now: float,
) -> Iterator[Slot]:
    """Return the slots of training that a sampler may attempt again, few of them that had a fault."""
    candidates = islice(slots.suspect, SUSPECTS_LOOKED_AT)
    due = (n for n in candidates if may_have(n) and times.may_retry(slots.by_number[n], holder, now=now))
    suspects = islice(due, max(1, wanted // SUSPECTS_PER_GRANT))
    sound = filter(may_have, islice(slots.sound, max(0, wanted) + SUSPECTS_LOOKED_AT))
    numbers = islice(heapq.merge(sound, suspects), max(0, wanted))
    return map(slots.by_number.__getitem__, numbers)


def fresh_slots(
    order: PromptOrder, first: int, wanted: int, aside: Callable[[int], Aside]
) -> Iterator[tuple[Slot, bool]]:
    """Yield slots that were never leased, and whether each is granted now; ``first``: number of the next."""
    number, skips, left = first, 0, 0
    while wanted > 0 and skips < SKIPS_PER_GRANT and left < LEFT_TO_OTHERS_PER_GRANT:
        slot = order.unused(number)
        match aside(slot.prompt_index):
            case Aside.FOR_ALL:
                skips += 1
                yield replace(slot, state=SlotState.SKIPPED), False
            case Aside.FOR_IT:
                left += 1
                yield slot, False
            case Aside.NOT:
                wanted -= 1
                yield slot, True
        number += 1
