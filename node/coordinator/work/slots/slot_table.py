"""The slots of a run: who may sample which prompt, and what became of each; pure.

Decisions return slots as they are to become and change nothing; ``apply`` makes them so once they are on
disk.
"""

import enum
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from node.coordinator.work.slots.bad_prompts import Aside
from node.coordinator.work.slots.next_slots import fresh_slots, up_again
from node.coordinator.work.slots.open_slots import OpenSlots
from node.coordinator.work.slots.prompt_order import PromptOrder
from node.coordinator.work.slots.slot import (
    HELD_OUT_FROM,
    NO_SLOTS,
    SETTLED,
    UNTRAINED,
    HeldOutAnswer,
    Slot,
    SlotBalance,
    SlotKind,
    SlotState,
    group_id,
    kind_of,
    reopened,
    slot_and_attempt,
)
from node.coordinator.work.slots.slot_generations import Generation, LostSlots
from node.coordinator.work.slots.slot_times import SlotTimes
from node.coordinator.work.terms.run_data import NO_DATA, DataSeen
from node.values.groups.failure import FAULTS, Failure
from node.values.groups.verdict import Verdict


class Claim(enum.Enum):
    WANTED = "wanted"
    NEVER_GRANTED = "never granted"
    DUPLICATE = "duplicate"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Training:
    """How step records settle the slots."""

    slots: tuple[Slot, ...]
    doubled: tuple[str, ...]
    """Groups whose slot was settled before: trained on twice."""
    unknown: tuple[str, ...]
    """Groups never submitted here."""
    lost: tuple[str, ...]
    """Groups of lost slots, which are among ``slots``: trained on, by whose attempt nobody knows."""


class SlotTable:
    def __init__(
        self,
        balance: SlotBalance = NO_SLOTS,
        *,
        generations: Iterable[Generation] = (),
        data: DataSeen = NO_DATA,
        prompts: int | None = None,
        seed: int = 0,
        lease_ttl_s: float,
        now: float,
    ) -> None:
        """Restore; ``prompts`` is None where no new slot is to be leased."""
        self.prompts = prompts
        self._order = PromptOrder(prompts, seed, data)
        self.open = OpenSlots()
        self._counts = dict.fromkeys(SlotState, 0) | dict(balance.settled)
        self.times = SlotTimes(lease_ttl_s)
        self._lost = LostSlots(open_ones=balance.lost, generations=generations, found=balance.found)
        self._next_slot = balance.next_slot
        self._next_held_out = balance.next_held_out
        self.apply(balance.open_ones, now=now)

    @property
    def next_slot(self) -> int:
        """Number of the next slot that is leased for the first time; 0: none ever was."""
        return self._next_slot

    @property
    def open_slots(self) -> Mapping[int, Slot]:
        return self.open.by_number

    def oldest_leases(self) -> dict[str, float]:
        """Return when each sampler's oldest lease was granted. Looks at every lease."""
        return {
            holder: min(map(self.times.granted_at_s.__getitem__, held))
            for holder, held in self.open.by_holder.items()
        }

    def took_s(self, slot: Slot, *, now: float) -> float | None:
        """Return the time from lease to group of a slot just won; None where it is not known."""
        granted_at_s = self.times.granted_at_s.get(slot.number)
        return None if granted_at_s is None or slot.winner != slot.granted else max(0.0, now - granted_at_s)

    def counts(self) -> dict[SlotState, int]:
        """Count the slots of training by state."""
        return dict(self._counts)

    def is_known(self, slot: int) -> bool:
        return 0 <= slot < self._next_slot or HELD_OUT_FROM <= slot < self._next_held_out

    def has_submitted(self, name: str) -> bool:
        """Whether a group of this id was submitted here, or may have been in the time that was lost."""
        number, attempt = slot_and_attempt(name)
        entry = self.open_slots.get(number)
        if entry is None:
            return self.is_known(number)
        named = entry.attempt(attempt)
        return named is not None and named.is_submitted

    def claim(self, slot: int, attempt: int, holder: str) -> Claim:
        """Return what a submission by ``holder`` would be."""
        if not self.is_known(slot):
            return Claim.NEVER_GRANTED
        if slot in self._lost:
            return Claim.LOST
        entry = self.open_slots.get(slot)
        if entry is None:
            return Claim.DUPLICATE
        named = entry.attempt(attempt)
        if named is None or named.holder != holder or named.failure in FAULTS:
            return Claim.NEVER_GRANTED
        if named.is_submitted or entry.state in UNTRAINED:
            return Claim.DUPLICATE
        return Claim.WANTED

    def grant(
        self, holder: str, wanted: int, *, now: float, aside: Callable[[int], Aside]
    ) -> tuple[Slot, ...]:
        """Lease up to ``wanted`` slots of training: those up for another attempt first, oldest first.

        Args:
            aside: Whether a prompt is to be passed over. A new slot is then returned as SKIPPED, or as
                AVAILABLE where others may have it.
        """

        def may_have(number: int) -> bool:
            return aside(self.open_slots[number].prompt_index) is Aside.NOT

        again = list(up_again(self.open, self.times, holder, wanted, may_have, now=now))
        more = 0 if self.prompts is None else wanted - len(again)
        fresh = list(fresh_slots(self._order, self._next_slot, more, aside))
        granted = (*again, *(slot for slot, is_granted in fresh if is_granted))
        leased = (slot.leased_to(holder) for slot in granted)
        return (*leased, *(slot for slot, is_granted in fresh if not is_granted))

    def grant_held_out(
        self, holder: str, wanted: int, *, now: float, may_have: Callable[[Slot], bool]
    ) -> tuple[Slot, ...]:
        """Lease up to ``wanted`` held-out slots that a sampler ``may_have``, lowest number first."""
        available = (self.open_slots[number] for number in self.open.held_out)
        due = (slot for slot in available if self.times.may_retry(slot, holder, now=now) and may_have(slot))
        return tuple(slot.leased_to(holder) for slot in islice(due, max(0, wanted)))

    def release(self, holder: str, lease_ids: Iterable[str]) -> tuple[Slot, ...]:
        """Return, unbegun, the slots of those leases that ``holder`` holds."""
        return tuple(
            replace(slot, state=SlotState.AVAILABLE, attempts=slot.attempts[:-1])
            for slot in (self._leased(lease_id, holder) for lease_id in dict.fromkeys(lease_ids))
            if slot is not None
        )

    def failed(self, holder: str, lease_id: str, fault: Failure) -> Slot | None:
        """Note that ``holder`` could not answer a lease; None where it does not hold it."""
        slot = self._leased(lease_id, holder)
        return None if slot is None else reopened(slot.with_failure(slot.granted, fault))

    def freed(self, holder: str) -> tuple[Slot, ...]:
        """Return, as if unbegun, every slot that ``holder`` holds."""
        held = (self.open_slots[number] for number in sorted(self.open.held_by(holder)))
        return self.release(holder, (group_id(slot.number, slot.granted) for slot in held))

    def renew(self, holder: str, lease_id: str, *, now: float, max_age_s: float = math.inf) -> bool:
        """Extend a lease to a full term, not beyond its maximal age; return whether its work is in vain.

        An expired lease is not in vain while nobody else has the prompt.
        """
        slot = self._leased(lease_id, holder)
        if slot is None:
            return not self._may_still_win(lease_id, holder)
        self.times.renew(slot.number, now=now, max_age_s=max_age_s)
        return False

    def bound_times(self, now: float) -> None:
        """Put no time further ahead than it can be: the clock was set back."""
        self.times.bound(now)

    def cut_short(self, holder: str, *, now: float) -> None:
        """Let every lease of ``holder`` end at the next ``expire``: the process that took it is gone."""
        self.times.end(self.open.held_by(holder), now=now)

    def expire(self, now: float) -> tuple[Slot, ...]:
        return tuple(
            reopened(slot.with_failure(slot.granted, Failure.EXPIRED))
            for slot in map(self.open_slots.__getitem__, self.times.ended(now))
        )

    def given_up(self, now: float, *, is_kept_from_some: Callable[[int], bool]) -> tuple[Slot, ...]:
        """End the slots that have waited too long for a sampler that may have their prompt."""
        waiting = map(self.open_slots.__getitem__, self.times.waited(now))
        return tuple(
            replace(slot, state=SlotState.ABANDONED if slot.attempts else SlotState.SKIPPED)
            for slot in waiting
            if is_kept_from_some(slot.prompt_index)
        )

    def submitted(
        self, slot: int, attempt: int, *, is_graded: bool = True, answer: HeldOutAnswer | None = None
    ) -> Slot:
        """Return the slot as a WANTED attempt wins it; ``answer``: what a held-out prompt's group says."""
        return self.open_slots[slot].won(attempt, is_graded=is_graded, answer=answer)

    def graded(self, slot: int, attempt: int) -> Slot | None:
        """Return the slot with its group graded; None where no such group waits for that."""
        entry = self._ungraded(slot, attempt)
        return None if entry is None else replace(entry, state=SlotState.SPOOLED)

    def ungradable(self, slot: int, attempt: int, fault: Failure) -> Slot | None:
        """Note that no verifier can grade the slot's group; None where no such group waits for that."""
        entry = self._ungraded(slot, attempt)
        return None if entry is None else reopened(entry.with_failure(attempt, fault))

    def spent(self, slot: int, attempt: int) -> Slot:
        """Note that a WANTED attempt brought a group nobody can use."""
        return self.open_slots[slot].spent(attempt)

    def refused(self, slot: int, attempt: int) -> Slot | None:
        """Put the slot up for another attempt; None where the group is not in play."""
        entry = self._in_play(slot, attempt)
        return None if entry is None else entry.refused()

    def taken_back(self, slot: int, attempt: int) -> Slot | None:
        """Refuse a group on another's word than the learner's; None where it is not in play."""
        entry = self._in_play(slot, attempt)
        return None if entry is None else entry.taken_back()

    def judged(self, slot: int, attempt: int, verdict: Verdict) -> Slot | None:
        """Return the slot after the learner's verdict on its group; None: the verdict changes nothing."""
        entry = self._in_play(slot, attempt)
        return None if entry is None else entry.judged(verdict)

    def trained(self, group_ids: Iterable[str]) -> Training:
        """Settle the slots of the groups a step consumed."""
        slots: dict[int, Slot] = {}
        doubled, unknown, lost = [], [], []
        for name in group_ids:
            number, attempt = slot_and_attempt(name)
            entry = self.open_slots.get(number)
            if not self.is_known(number) or kind_of(number) is SlotKind.HELD_OUT:
                unknown.append(name)
            elif number in slots:
                doubled.append(name)
            elif number in self._lost:
                lost.append(name)
                unused = self._order.unused(number)
                slots[number] = replace(unused, state=SlotState.TRAINED, granted=attempt, winner=attempt)
            elif entry is None:
                doubled.append(name)
            elif (named := entry.attempt(attempt)) is None or not named.is_submitted:
                unknown.append(name)
            else:
                slots[number] = replace(entry, state=SlotState.TRAINED, winner=attempt)
        return Training(tuple(slots.values()), tuple(doubled), tuple(unknown), tuple(lost))

    def apply(self, slots: Iterable[Slot], *, now: float) -> None:
        """Make decided slots the truth; a lease that is new gets its full term."""
        for slot in slots:
            is_settled = slot.state in SETTLED
            before = self.open.pop(slot.number) if is_settled else self.open.put(slot)
            if slot.kind is SlotKind.TRAIN:
                self._count(slot, before)
            else:
                self._next_held_out = max(self._next_held_out, slot.number + 1)
            self.times.note(slot, before, now=now)

    def _count(self, slot: Slot, before: Slot | None) -> None:
        """Count a slot of training by its state; ``before``: what it was, None where it was not open."""
        self._next_slot = max(self._next_slot, slot.number + 1)
        self._counts[slot.state] += 1
        if before is not None:
            self._counts[before.state] -= 1
        elif slot.number in self._lost and self._lost.discard(slot.number):
            self._counts[SlotState.LOST] -= 1
        if slot.state is SlotState.LOST:
            self._lost.add(slot.number)

    def _ungraded(self, slot: int, attempt: int) -> Slot | None:
        """Return a slot whose group waits to be graded and came from this attempt."""
        entry = self._in_play(slot, attempt)
        return entry if entry is not None and entry.state is SlotState.UNGRADED else None

    def _in_play(self, slot: int, attempt: int) -> Slot | None:
        """Return a slot whose group waits for training and came from this attempt."""
        entry = self.open_slots.get(slot)
        return entry if entry is not None and entry.state in UNTRAINED and entry.winner == attempt else None

    def _leased(self, lease_id: str, holder: str) -> Slot | None:
        number, attempt = slot_and_attempt(lease_id)
        slot = self.open_slots.get(number)
        if slot is None or slot.lease is None:
            return None
        return slot if slot.lease.number == attempt and slot.lease.holder == holder else None

    def _may_still_win(self, lease_id: str, holder: str) -> bool:
        number, attempt = slot_and_attempt(lease_id)
        slot = self.open_slots.get(number)
        if slot is None or slot.state is not SlotState.AVAILABLE:
            return False
        return self.claim(number, attempt, holder) is Claim.WANTED
