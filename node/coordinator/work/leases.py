"""The leases of a run: who may sample which prompt, and what became of each slot; pure.

A slot is one intended use of one prompt. It has attempts; the first attempt submitted wins.

    available --grant--> leased --submit--> spooled --accept--> accepted --train--> trained
        ^                  |                   |                    |
        |--expire/release/fail                 |                    |
        |-----------------refuse---------------'--------------------'
        '-- once too many attempts have failed (see ``retries``), instead: abandoned

    skipped: its turn came while its prompt was aside; never leased
    lost: it may have been trained on without the ledger knowing, because it was open in a backup that was
          restored, or the learner says that it had the group before; never leased again

A late attempt, whose lease expired, still wins while the slot is available or leased again. What the learner
says it has trained on is a fact: it settles the slot, whoever holds it by then.

Decisions return slots as they are to become and change nothing; ``apply`` makes them so once they are on
disk. The deadlines of leases are kept in memory only: after a restart every lease gets a full term, because
nobody could renew it meanwhile.
"""

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from node.coordinator.work.generations import LostSlots
from node.coordinator.work.prompt_order import prompt_of_slot
from node.coordinator.work.retries import SAME_SAMPLER_S, reopened, retry_after_s
from node.coordinator.work.slots import (
    SETTLED,
    UNTRAINED,
    Attempt,
    Slot,
    SlotState,
    slot_and_attempt,
)
from node.failure import FAULTS, Failure

SUSPECTS_PER_GRANT: Final = 4
"""One lease in so many of a grant, or one, may be on a slot that had a fault: they must not fill it."""

SKIPS_PER_GRANT: Final = 1024
"""Slots passed over for one grant. Where more in a row have prompts aside, the next request goes on."""


class Standing(enum.Enum):
    """What a submission under some id is, before anyone looks into the group."""

    WANTED = "wanted"
    NEVER_GRANTED = "never granted"
    DUPLICATE = "duplicate"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Training:
    """What a step record does to the slots."""

    slots: tuple[Slot, ...]
    winners: tuple[Attempt, ...]
    """The attempt trained on, for each of ``slots``."""
    doubled: tuple[str, ...]
    """Groups whose slot was settled before: trained on twice."""
    unknown: tuple[str, ...]
    """Groups that were never submitted here."""
    lost: tuple[str, ...] = ()
    """Groups of lost slots."""
    found: tuple[Slot, ...] = ()
    """Their slots, which are lost no more: trained on, by whose attempt nobody knows."""


class Leases:
    """All slots of a run: the open ones one by one, the settled ones as counts."""

    def __init__(
        self,
        *,
        prompts: int | None,
        seed: int,
        lease_ttl_s: float,
        slots: Iterable[Slot],
        settled: Mapping[SlotState, int],
        next_slot: int,
        lost: LostSlots,
        now: float,
    ) -> None:
        """Restore from the open ``slots`` and the count of ``settled`` ones; none: a new run.

        Args:
            prompts: Of the task; None while nobody has said: nothing new is leased until ``prompts`` is set.
            next_slot: Number of the next slot to be leased for the first time.
            lost: Slots that are never leased again although nobody knows what became of them.
        """
        self.prompts = prompts
        self._seed = seed
        self._lease_ttl_s = lease_ttl_s
        self._open: dict[int, Slot] = {}
        self._counts = dict.fromkeys(SlotState, 0) | dict(settled)
        self._deadline_s: dict[int, float] = {}
        self._retry_at_s: dict[int, float] = {}
        """Of slots that are available and had a fault; in memory only, as deadlines are."""
        self._lost = lost
        self._next_slot = next_slot
        self.apply(slots, now=now)

    @property
    def next_slot(self) -> int:
        """Number of the next slot that is leased for the first time; 0: none ever was."""
        return self._next_slot

    @property
    def open_slots(self) -> Mapping[int, Slot]:
        """Slots that are not settled, by number."""
        return self._open

    def counts(self) -> dict[SlotState, int]:
        """Count slots by state."""
        return dict(self._counts)

    def untrained(self) -> list[Slot]:
        """Return the slots whose group waits for training, oldest first."""
        return [slot for _, slot in sorted(self._open.items()) if slot.state in UNTRAINED]

    def is_known(self, slot: int) -> bool:
        """Whether the slot was ever leased."""
        return 0 <= slot < self._next_slot

    def has_submitted(self, name: str) -> bool:
        """Whether a group of this id was submitted here, or may have been in the time that was lost."""
        number, attempt = slot_and_attempt(name)
        entry = self._open.get(number)
        if entry is None:
            return self.is_known(number)
        named = entry.attempt(attempt)
        return named is not None and named.is_submitted

    def standing(self, slot: int, attempt: int, holder: str) -> Standing:
        """Return what a submission by ``holder`` would be."""
        if not self.is_known(slot):
            return Standing.NEVER_GRANTED
        if slot in self._lost:
            return Standing.LOST
        entry = self._open.get(slot)
        if entry is None:
            return Standing.DUPLICATE
        named = entry.attempt(attempt)
        if named is None or named.holder != holder or named.failure in FAULTS:
            return Standing.NEVER_GRANTED
        if named.is_submitted or entry.state in UNTRAINED:
            return Standing.DUPLICATE
        return Standing.WANTED

    def grant(
        self,
        holder: str,
        wanted: int,
        *,
        now: float,
        is_aside: Callable[[int], bool],
        passes_over: Callable[[Slot], bool] = lambda _: False,
    ) -> tuple[Slot, ...]:
        """Lease up to ``wanted`` slots: those up for another attempt first, oldest first.

        Args:
            is_aside: Whether a prompt is to be passed over; its slot is returned as SKIPPED.
            passes_over: Whether a slot up for another attempt is left to other samplers.
        """
        again = list(self._up_again(holder, wanted, now=now, passes_over=passes_over))
        fresh = [] if self.prompts is None else list(self._fresh(wanted - len(again), is_aside))
        leased = (
            replace(
                slot,
                state=SlotState.LEASED,
                granted=slot.granted + 1,
                attempts=(*slot.attempts, Attempt(slot.granted + 1, holder)),
            )
            for slot in (*again, *fresh)
            if slot.state is SlotState.AVAILABLE
        )
        return (*leased, *(slot for slot in fresh if slot.state is SlotState.SKIPPED))

    def release(self, holder: str, lease_ids: Iterable[str]) -> tuple[Slot, ...]:
        """Return, unbegun, the slots of those leases that ``holder`` holds."""
        return tuple(
            replace(slot, state=SlotState.AVAILABLE, attempts=slot.attempts[:-1])
            for slot in (self._leased(lease_id, holder) for lease_id in dict.fromkeys(lease_ids))
            if slot is not None
        )

    def failed(self, holder: str, lease_id: str, fault: Failure, *, is_last: bool) -> Slot | None:
        """Note that ``holder`` could not answer a lease; None where it does not hold it.

        Args:
            is_last: Whether the slot gets no other attempt, however many it has left.
        """
        slot = self._leased(lease_id, holder)
        if slot is None:
            return None
        failed = reopened(slot.with_failure(slot.granted, fault))
        return replace(failed, state=SlotState.ABANDONED) if is_last else failed

    def renew(self, holder: str, lease_ids: Iterable[str], *, now: float) -> tuple[str, ...]:
        """Extend the leases to a full term from ``now``; return those whose work is in vain.

        An expired lease is not in vain while nobody else has the prompt.
        """
        lost = []
        for lease_id in lease_ids:
            slot = self._leased(lease_id, holder)
            if slot is not None:
                self._deadline_s[slot.number] = now + self._lease_ttl_s
            elif not self._may_still_win(lease_id, holder):
                lost.append(lease_id)
        return tuple(lost)

    def expire(self, now: float) -> tuple[Slot, ...]:
        """End every lease whose deadline has passed."""
        return tuple(
            reopened(slot.with_failure(slot.granted, Failure.EXPIRED))
            for slot in (self._open[n] for n, deadline_s in self._deadline_s.items() if deadline_s <= now)
        )

    def submitted(self, slot: int, attempt: int) -> Slot:
        """Return the slot as a WANTED attempt wins it."""
        return replace(self._open[slot].with_submission(attempt), state=SlotState.SPOOLED, winner=attempt)

    def spent(self, slot: int, attempt: int) -> Slot:
        """Note that a WANTED attempt brought a group nobody can use."""
        was = self._open[slot]
        entry = was.with_submission(attempt).with_failure(attempt, Failure.REFUSED)
        is_running = was.lease is not None and was.lease.number == attempt
        return reopened(entry) if is_running else entry

    def accepted(self, slot: int, attempt: int) -> Slot | None:
        """Note the learner's acceptance; None where it changes nothing."""
        entry = self._in_play(slot, attempt)
        if entry is None or entry.state is SlotState.ACCEPTED:
            return None
        return replace(entry, state=SlotState.ACCEPTED)

    def refused(self, slot: int, attempt: int) -> Slot | None:
        """Put the slot up for another attempt; None where the group is not in play."""
        entry = self._in_play(slot, attempt)
        return None if entry is None else reopened(entry.with_failure(attempt, Failure.REFUSED))

    def lost(self, slot: int, attempt: int) -> Slot | None:
        """Return up a slot whose group was trained on before; None where the group is not in play."""
        entry = self._in_play(slot, attempt)
        return None if entry is None else replace(entry, state=SlotState.LOST, winner=0)

    def trained(self, group_ids: Iterable[str]) -> Training:
        """Settle the slots of the groups a step consumed."""
        slots: dict[int, Slot] = {}
        found: dict[int, Slot] = {}
        winners, doubled, unknown, lost = [], [], [], []
        for name in group_ids:
            number, attempt = slot_and_attempt(name)
            entry = self._open.get(number)
            if not self.is_known(number):
                unknown.append(name)
            elif number in slots or number in found:
                doubled.append(name)
            elif number in self._lost:
                lost.append(name)
                found[number] = replace(
                    self._unused(number), state=SlotState.TRAINED, granted=attempt, winner=attempt
                )
            elif entry is None:
                doubled.append(name)
            elif (named := entry.attempt(attempt)) is None or not named.is_submitted:
                unknown.append(name)
            else:
                slots[number] = replace(entry, state=SlotState.TRAINED, winner=attempt)
                winners.append(named)
        return Training(
            tuple(slots.values()),
            tuple(winners),
            tuple(doubled),
            tuple(unknown),
            lost=tuple(lost),
            found=tuple(found.values()),
        )

    def apply(self, slots: Iterable[Slot], *, now: float) -> None:
        """Make decided slots the truth; a lease that is new gets its full term."""
        for slot in slots:
            before = self._open.pop(slot.number, None)
            self._next_slot = max(self._next_slot, slot.number + 1)
            self._counts[slot.state] += 1
            if before is not None:
                self._counts[before.state] -= 1
            elif slot.number in self._lost and self._lost.discard(slot.number):
                self._counts[SlotState.LOST] -= 1
            if slot.state is SlotState.LOST:
                self._lost.add(slot.number)
            if slot.state not in SETTLED:
                self._open[slot.number] = slot
            self._retry_at_s.pop(slot.number, None)
            if (pause_s := retry_after_s(slot)) is not None:
                self._retry_at_s[slot.number] = now + pause_s
            if slot.lease is None:
                self._deadline_s.pop(slot.number, None)
            elif before is None or before.lease != slot.lease:
                self._deadline_s[slot.number] = now + self._lease_ttl_s

    def _up_again(
        self, holder: str, wanted: int, *, now: float, passes_over: Callable[[Slot], bool]
    ) -> Iterator[Slot]:
        suspects = max(1, wanted // SUSPECTS_PER_GRANT)
        for _, slot in sorted(self._open.items()):
            if wanted <= 0:
                return
            if slot.state is not SlotState.AVAILABLE or passes_over(slot):
                continue
            if slot.had_fault():
                retry_at_s = self._retry_at_s.get(slot.number, now)
                retry_at_s += SAME_SAMPLER_S if slot.had_fault(holder) else 0.0
                if not suspects or retry_at_s > now:
                    continue
                suspects -= 1
            wanted -= 1
            yield slot

    def _fresh(self, wanted: int, is_aside: Callable[[int], bool]) -> Iterator[Slot]:
        number, skips = self._next_slot, 0
        while wanted > 0 and skips < SKIPS_PER_GRANT:
            slot = self._unused(number)
            if is_aside(slot.prompt_index):
                skips += 1
                yield replace(slot, state=SlotState.SKIPPED)
            else:
                wanted -= 1
                yield slot
            number += 1

    def _unused(self, number: int) -> Slot:
        # Nothing is leased before the prompts are counted; the prompt of a lost slot is for people only.
        prompt_index = (
            0 if self.prompts is None else prompt_of_slot(number, prompts=self.prompts, seed=self._seed)
        )
        return Slot(number, prompt_index, SlotState.AVAILABLE, attempts=(), granted=0)

    def _in_play(self, slot: int, attempt: int) -> Slot | None:
        """Return a slot whose group waits for training and came from this attempt."""
        entry = self._open.get(slot)
        return entry if entry is not None and entry.state in UNTRAINED and entry.winner == attempt else None

    def _leased(self, lease_id: str, holder: str) -> Slot | None:
        number, attempt = slot_and_attempt(lease_id)
        slot = self._open.get(number)
        if slot is None or slot.lease is None:
            return None
        return slot if slot.lease.number == attempt and slot.lease.holder == holder else None

    def _may_still_win(self, lease_id: str, holder: str) -> bool:
        number, attempt = slot_and_attempt(lease_id)
        slot = self._open.get(number)
        if slot is None or slot.state is not SlotState.AVAILABLE:
            return False
        return self.standing(number, attempt, holder) is Standing.WANTED
