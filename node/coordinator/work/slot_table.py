"""The slots of a run: who may sample which prompt, and what became of each; pure.

    available --grant--> leased --submit--> spooled --accept--> accepted --train--> trained
        ^                  |                   |                    |
        |--expire/release/fail                 |                    |
        |-----------------refuse---------------'--------------------'

    where verifiers grade:  leased --submit--> ungraded --grade--> spooled; one may refuse it, too

        '-- once too many attempts have failed (see ``slots``), instead: abandoned

    held-out slots: leased --submit--> spooled --its check is over, or there is none--> evaluated
                    they are put in when an evaluation begins (see ``evaluations``), and none is made up

    skipped: its turn came while its prompt was aside, or kept from the only sampler there is; never leased
    lost: it may have been trained on without the ledger knowing, because it was open in a backup that was
          restored, the learner says that it had the group before, or its last attempt's group was taken back
          from the learner; never leased again

The first attempt submitted wins. A lease ends a term after its holder's last heartbeat, and at its maximal
age whatever heartbeats say (see ``standing``). A late attempt, whose lease expired, still wins while the slot
is available or leased again. What the learner says it has trained on is a fact: it settles the slot, whoever
holds it by then.

Decisions return slots as they are to become and change nothing; ``apply`` makes them so once they are on
disk. Deadlines are kept in memory only: after a restart every lease gets a full term, because nobody could
renew it meanwhile.
"""

import enum
import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from node.coordinator.work.bad_prompts import Aside
from node.coordinator.work.open_slots import OpenSlots
from node.coordinator.work.run_data import NO_DATA, DataSeen
from node.coordinator.work.slot_generations import Generation, LostSlots
from node.coordinator.work.slots import (
    FIRST_RETRY_S,
    HELD_OUT_FROM,
    SAME_SAMPLER_S,
    SETTLED,
    UNTRAINED,
    WAIT_FOR_OTHERS_S,
    HeldOutAnswer,
    Slot,
    SlotKind,
    SlotState,
    group_id,
    kind_of,
    prompt_of_slot,
    reopened,
    slot_and_attempt,
)
from node.failure import FAULTS, Failure
from node.verdict import Verdict

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


@dataclass(frozen=True, slots=True)
class SlotBalance:
    open_ones: tuple[Slot, ...] = ()
    """Slots of both kinds; the fields that follow are of training's."""
    settled: Mapping[SlotState, int] = field(default_factory=dict)
    next_slot: int = 0
    """Number of the next slot to be leased for the first time."""
    next_held_out: int = HELD_OUT_FROM
    """Number after the newest held-out slot there ever was."""
    lost: tuple[int, ...] = ()
    found: tuple[int, ...] = ()
    """Between two generations, and named by a step record since."""


class SlotTable:
    def __init__(
        self,
        balance: SlotBalance = SlotBalance(),
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
        self._seed = seed
        self._data = data
        self._lease_ttl_s = lease_ttl_s
        self.open = OpenSlots()
        self._counts = dict.fromkeys(SlotState, 0) | dict(balance.settled)
        self._deadlines: dict[int, float] = {}
        self._retry_at_s: dict[int, float] = {}
        """When slots with a fault may be leased again; in memory only, like all these times."""
        self._granted_at_s: dict[int, float] = {}
        """Time of the newest lease of each slot that is leased or available again."""
        self._waiting: dict[int, float] = {}
        """When slots that are available are given up, if their prompts are kept from somebody."""
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
            holder: min(self._granted_at_s[number] for number in held)
            for holder, held in self.open.by_holder.items()
        }

    def took_s(self, slot: Slot, *, now: float) -> float | None:
        """Return the time from lease to group of a slot just won; None where it is not known."""
        granted_at_s = self._granted_at_s.get(slot.number)
        return None if granted_at_s is None or slot.winner != slot.granted else max(0.0, now - granted_at_s)

    def counts(self) -> dict[SlotState, int]:
        """Count the slots of training by state."""
        return dict(self._counts)

    def answered(self) -> list[Slot]:
        """Return the held-out slots whose group does not count yet, lowest number first."""
        return [self.open_slots[number] for number in sorted(self.open.answered)]

    def untrained(self) -> list[Slot]:
        """Return the slots whose group waits for training, oldest first."""
        return [self.open_slots[number] for number in sorted(self.open.untrained)]

    def deliver_anew(self, held: Collection[str]) -> None:
        """Count every group that waits for training as undelivered, except those that the learner holds."""
        for slot in self.untrained():
            if slot.state is SlotState.UNGRADED:
                continue
            is_held = group_id(slot.number, slot.winner) in held
            (self.open.undelivered.discard if is_held else self.open.undelivered.add)(slot.number)

    def next_undelivered(self, is_held: Callable[[int], bool] = lambda _: False) -> Slot | None:
        """Return the oldest slot whose group was not delivered, and count it as delivered; None: none.

        Groups that are held back are passed over.
        """
        number = next((number for number in self.open.undelivered if not is_held(number)), None)
        if number is None:
            return None
        self.open.undelivered.discard(number)
        return self.open_slots[number]

    def undelivered(self, number: int) -> Slot | None:
        """Return a slot whose group was neither sent to the learner nor counted in a score; else None."""
        here = (self.open.undelivered, self.open.ungraded, self.open.answered)
        return self.open_slots[number] if any(number in numbers for numbers in here) else None

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
        self,
        holder: str,
        wanted: int,
        *,
        now: float,
        aside: Callable[[int], Aside],
    ) -> tuple[Slot, ...]:
        """Lease up to ``wanted`` slots of training: those up for another attempt first, oldest first.

        Args:
            aside: Whether a prompt is to be passed over. A new slot is then returned as SKIPPED, or as
                AVAILABLE where others may have it.
        """

        def may_have(number: int) -> bool:
            return aside(self.open_slots[number].prompt_index) is Aside.NOT

        again = list(self._up_again(holder, wanted, may_have, now=now))
        fresh = [] if self.prompts is None else list(self._fresh(wanted - len(again), aside))
        granted = (*again, *(slot for slot, is_granted in fresh if is_granted))
        leased = (slot.leased_to(holder) for slot in granted)
        return (*leased, *(slot for slot, is_granted in fresh if not is_granted))

    def grant_held_out(
        self, holder: str, wanted: int, *, now: float, may_have: Callable[[Slot], bool]
    ) -> tuple[Slot, ...]:
        """Lease up to ``wanted`` held-out slots that a sampler ``may_have``, lowest number first."""
        available = (self.open_slots[number] for number in self.open.held_out)
        due = (slot for slot in available if self._may_retry(slot.number, holder, now=now) and may_have(slot))
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
        if now < self._granted_at_s[slot.number] + max_age_s:
            self._deadlines[slot.number] = now + self._lease_ttl_s
        return False

    def bound_times(self, now: float) -> None:
        """Put no time further ahead than it can be: the clock was set back.

        Otherwise what a dead sampler holds would stay leased for as long as the clock was wrong.
        """
        for times, latest_s in (
            (self._deadlines, now + self._lease_ttl_s),
            (self._granted_at_s, now),
            (self._retry_at_s, now + FIRST_RETRY_S),
            (self._waiting, now + WAIT_FOR_OTHERS_S),
        ):
            times.update({number: latest_s for number, at_s in times.items() if at_s > latest_s})

    def cut_short(self, holder: str, *, now: float) -> None:
        """Let every lease of ``holder`` end at the next ``expire``: the process that took it is gone."""
        self._deadlines |= dict.fromkeys(self.open.held_by(holder), now)

    def expire(self, now: float) -> tuple[Slot, ...]:
        return tuple(
            reopened(slot.with_failure(slot.granted, Failure.EXPIRED))
            for slot in map(self.open_slots.__getitem__, _due(self._deadlines, now))
        )

    def given_up(self, now: float, *, is_kept_from_some: Callable[[int], bool]) -> tuple[Slot, ...]:
        """End the slots that have waited too long for a sampler that may have their prompt."""
        waiting = map(self.open_slots.__getitem__, _due(self._waiting, now))
        return tuple(
            replace(slot, state=SlotState.ABANDONED if slot.attempts else SlotState.SKIPPED)
            for slot in waiting
            if is_kept_from_some(slot.prompt_index)
        )

    def submitted(
        self, slot: int, attempt: int, *, is_graded: bool = True, answer: HeldOutAnswer | None = None
    ) -> Slot:
        """Return the slot as a WANTED attempt wins it; ``answer``: what a held-out prompt's group says."""
        state = SlotState.SPOOLED if is_graded else SlotState.UNGRADED
        won = self.open_slots[slot].with_submission(attempt)
        return replace(won, state=state, winner=attempt, answer=answer)

    def graded(self, slot: int, attempt: int) -> Slot | None:
        """Return the slot with its group graded; None where no such group waits for that."""
        entry = self._in_play(slot, attempt)
        is_ungraded = entry is not None and entry.state is SlotState.UNGRADED
        return replace(entry, state=SlotState.SPOOLED) if entry is not None and is_ungraded else None

    def ungradable(self, slot: int, attempt: int, fault: Failure) -> Slot | None:
        """Note that no verifier can grade the slot's group; None where no such group waits for that."""
        entry = self._in_play(slot, attempt)
        if entry is None or entry.state is not SlotState.UNGRADED:
            return None
        return reopened(entry.with_failure(attempt, fault))

    def spent(self, slot: int, attempt: int) -> Slot:
        """Note that a WANTED attempt brought a group nobody can use."""
        was = self.open_slots[slot]
        entry = was.with_submission(attempt).with_failure(attempt, Failure.REFUSED)
        is_running = was.lease is not None and was.lease.number == attempt
        return reopened(entry) if is_running else entry

    def refused(self, slot: int, attempt: int) -> Slot | None:
        """Put the slot up for another attempt; None where the group is not in play."""
        entry = self._in_play(slot, attempt)
        return None if entry is None else reopened(entry.with_failure(attempt, Failure.REFUSED))

    def taken_back(self, slot: int, attempt: int) -> Slot | None:
        """Refuse a group on another's word than the learner's, which may be training on it meanwhile.

        A slot that would be abandoned for it is lost instead: a step record that is on its way may name it.
        """
        entry = self.refused(slot, attempt)
        is_given_up = entry is not None and entry.state is SlotState.ABANDONED and slot < HELD_OUT_FROM
        return replace(entry, state=SlotState.LOST) if entry is not None and is_given_up else entry

    def judged(self, slot: int, attempt: int, verdict: Verdict) -> Slot | None:
        """Return the slot after the learner's verdict on its group; None: the verdict changes nothing."""
        entry = self._in_play(slot, attempt)
        if entry is None or entry.state is SlotState.UNGRADED:
            return None
        if verdict is Verdict.ACCEPTED and entry.state is SlotState.ACCEPTED:
            return None
        match verdict:
            case Verdict.ACCEPTED:
                return replace(entry, state=SlotState.ACCEPTED)
            case Verdict.DUPLICATE:  # trained on before
                return replace(entry, state=SlotState.LOST, winner=0)
            case Verdict.UNINFORMATIVE:
                return replace(entry, state=SlotState.UNINFORMATIVE)
            case _:
                return self.refused(slot, attempt)

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
                unused = self._unused(number)
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
            self._retry_at_s.pop(slot.number, None)
            if slot.state is SlotState.AVAILABLE and slot.last_failure in FAULTS:
                self._retry_at_s[slot.number] = now + FIRST_RETRY_S
            if slot.state is not SlotState.AVAILABLE:
                self._waiting.pop(slot.number, None)
            elif before is None or before.state is not SlotState.AVAILABLE:
                self._waiting[slot.number] = now + WAIT_FOR_OTHERS_S
            if is_settled or slot.state in UNTRAINED:
                self._granted_at_s.pop(slot.number, None)
            if slot.lease is None:
                self._deadlines.pop(slot.number, None)
            elif before is None or before.lease != slot.lease:
                self._deadlines[slot.number] = now + self._lease_ttl_s
                self._granted_at_s[slot.number] = now

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

    def _up_again(
        self, holder: str, wanted: int, may_have: Callable[[int], bool], *, now: float
    ) -> Iterator[Slot]:
        candidates = islice(self.open.suspect, SUSPECTS_LOOKED_AT)
        due = (n for n in candidates if may_have(n) and self._may_retry(n, holder, now=now))
        suspects = islice(due, max(1, wanted // SUSPECTS_PER_GRANT))
        sound = filter(may_have, islice(self.open.sound, max(0, wanted) + SUSPECTS_LOOKED_AT))
        numbers = islice(heapq.merge(sound, suspects), max(0, wanted))
        return map(self.open_slots.__getitem__, numbers)

    def _may_retry(self, number: int, holder: str, *, now: float) -> bool:
        """Whether a slot that had a fault may be leased to this sampler now."""
        retry_at_s = self._retry_at_s.get(number, now)
        had_it = self.open_slots[number].had_fault(holder)
        return retry_at_s + (SAME_SAMPLER_S if had_it else 0.0) <= now

    def _fresh(self, wanted: int, aside: Callable[[int], Aside]) -> Iterator[tuple[Slot, bool]]:
        """Yield slots that were never leased, and whether each is granted now."""
        number, skips, left = self._next_slot, 0, 0
        while wanted > 0 and skips < SKIPS_PER_GRANT and left < LEFT_TO_OTHERS_PER_GRANT:
            slot = self._unused(number)
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

    def _unused(self, number: int) -> Slot:
        # Without prompts nothing new is leased; the prompt of a lost slot is for people only.
        held_out = range(self._data.held_out_at, self._data.held_out_at + self._data.evaluation_rows)
        prompt_index = 0
        if self.prompts is not None:
            prompt_index = prompt_of_slot(
                number,
                prompts=self.prompts,
                seed=self._seed,
                first_slot=self._data.first_slot,
                held_out=held_out,
            )
        return Slot(number, prompt_index, SlotState.AVAILABLE, attempts=(), granted=0)

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


def _due(deadlines: Mapping[int, float], now: float) -> list[int]:
    """Return the slots whose time is up, lowest first; looks at all, 65 536 at most, once a second."""
    return sorted(number for number, at_s in deadlines.items() if at_s <= now)
