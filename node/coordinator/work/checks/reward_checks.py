"""The groups whose rewards are worked out again, from the draw to the finding; pure.

    spooled --drawn by a secret--> held --> sent to a verifier --> answered --finding on disk--> settled
       |            |               ^           |     |                 '-- not written: asked again
       |            |               |           |     '-- out of patience: offered to another verifier, too
       |            |               '-----------'-- the verifier has gone
       |            '-- no verifier is there, or its sampler has no room: delivered, and owed
       '-- not drawn: delivered

    owed --> checked afterwards, when no group that is held may be sent; trained on or not

A group that is held back waits for no other, and no other waits for it. The share that is drawn follows the
sampler's record: every group of a newcomer, so that it moves nothing unchecked, and soon one in twelve while
its checks agree (``sampler_standing``). Nobody can tell which: the draw is a keyed hash of the group's id,
and the key never leaves this process.

**Shared out by sampler** (``open_checks``). A sampler at its bound hands in no more and is leased no more, if
it is a newcomer or its groups are dear to check (``verifier_places``): it waits for its own checks. Where the
verifiers are too slow for everybody's groups, those of proven samplers are passed over and owed instead. No
group goes on unchecked because its check is slow.

**Owed.** What was delivered unchecked is checked afterwards. Its bytes stay in the ledger although it was
trained on, within bounds that are shared out by sampler likewise. A lie that is found then is proof like any.

Where a verifier is required, no group goes on unchecked for want of one: all wait, and those that were drawn
are asked for again until there is an answer. Where verifiers grade, every group waits for grades, and none
goes on without; it is at one verifier at a time as long as that one answers.

A group that ``MOST_TRIES`` verifiers have left unanswered may be what ends them, and is given up. Answers
to held-out prompts are all drawn, and held from the score in place of the learner.
"""

import hashlib
from collections.abc import Container, Iterable
from dataclasses import replace
from typing import Final

from node.coordinator.work.checks.check_queue import Held
from node.coordinator.work.checks.check_tally import CheckTally
from node.coordinator.work.checks.open_checks import OpenCheck, OpenChecks, Why
from node.coordinator.work.checks.verifier_places import GRADING_LIMIT_S, LATE_FACTOR, VerifierPlaces
from node.coordinator.work.slots.slot import Slot

HELD_S: Final = LATE_FACTOR * GRADING_LIMIT_S
"""Longest for what a finding means to come to disk; then the group is asked for again."""

MOST_TRIES: Final = 3
"""Verifiers that leave a group unanswered before it is given up, or terms for which it is late everywhere."""

PUT_OFF_S: Final = 10.0
"""Until a group is sent again whose grader could not be asked, such as a judge that is away."""


class RewardChecks:
    """The groups being checked. What waited when the process ended is drawn again."""

    def __init__(
        self,
        secret: bytes,
        *,
        most_held: int,
        most_owed_bytes: int,
        is_required: bool = False,
        grades: bool = False,
    ) -> None:
        self._secret = secret
        self._most_held, self._most_owed_bytes = most_held, most_owed_bytes
        self._grades = grades
        self._is_required = is_required or grades
        self.verifiers: set[VerifierPlaces] = set()
        self.is_open = False
        """Whether there is a verifier that answers."""
        self.has_had_verifier = False
        """Whether the run has ever had one; without one, nothing is owed."""
        self.tally = CheckTally()
        self.passed_over = 0
        """Groups that were drawn and delivered unchecked, since this was last set."""
        self.unkept = 0
        """How many of those will never be checked, for want of room."""
        self._clear()

    def _clear(self) -> None:
        self._checks = OpenChecks(most_held=self._most_held, most_owed_bytes=self._most_owed_bytes)

    def __len__(self) -> int:
        """Return how many groups are held back."""
        return self._checks.held.total

    @property
    def owed(self) -> int:
        """Groups for training that are to be checked afterwards."""
        return self._checks.owed.total

    @property
    def are_made(self) -> bool:
        """Whether a verifier is there, or every group waits for one."""
        return self.is_open or self._is_required

    @property
    def lacks_verifier(self) -> bool:
        """Whether every group is held because a verifier is required and there is none."""
        return self._is_required and not self.is_open and not self._grades

    def held_by(self, sampler_id: str) -> int:
        """Return how many groups of a sampler are held back."""
        return self._checks.held.of(sampler_id)

    def is_held(self, slot: int) -> bool:
        check = self._checks.of_slot(slot)
        return self.lacks_verifier or (check is not None and check.why is Why.HELD)

    def must_wait(self, sampler_id: str, *, is_vetted: bool, now: float) -> bool:
        """Whether a sampler hands in and is leased no more until groups of its own are checked."""
        if not self._checks.held.of(sampler_id) or self._checks.held.has_room(sampler_id):
            return False
        return self._is_required or not is_vetted or self._is_dear(sampler_id, now)

    def lease_room(self, sampler_id: str, *, running: int, is_vetted: bool, now: float) -> int | None:
        """Return how many more leases a sampler may have; None: checks bound nothing.

        Groups that it could not hand in for want of room would keep leases from others, so those that would
        all be held count already while it works on them.
        """
        if self.must_wait(sampler_id, is_vetted=is_vetted, now=now):
            return 0
        is_drawn = self._grades or (self.is_open and (not is_vetted or self._is_dear(sampler_id, now)))
        if not is_drawn:
            return None
        own = self._checks.held.of(sampler_id)
        left = max(0, self._most_held - self._checks.held.total - own)
        # Alone it may hold half of the room; where verifiers grade, what it works on may fill the rest.
        return max(0 if own or running else 1, (left if self._grades else left // 2) - running)

    def draw(self, held: Held, *, share: float) -> None:
        """Hold a group that was just spooled back, if it is drawn."""
        is_drawn = self._number(held.group_id) < share
        self.tally.note_group(held.sampler_id, is_drawn=is_drawn)
        if not is_drawn:
            return
        has_room = not self._checks.held.of(held.sampler_id) or self._checks.held.has_room(held.sampler_id)
        if self._is_required or (self.is_open and has_room):
            self._checks.begin(held, Why.HELD)
        else:
            self._pass_over(held)

    def restore(self, owed: Iterable[Held]) -> None:
        """Forget everything but the groups that the ledger has kept to be checked."""
        self._clear()
        for held in owed:
            self.has_had_verifier = True
            self._checks.begin(held, Why.OWED)

    def kept(self, slots: Iterable[Slot]) -> frozenset[int]:
        """Return those of some consumed slots whose groups are still to be checked."""
        return frozenset(slot.number for slot in slots if self._checks.is_kept(slot))

    def owed_slots(self, sampler_ids: Container[str] | None = None) -> frozenset[int]:
        """Return the slots of groups that are owed: of these samplers, or of all."""
        owed = (check.held for check in self._checks if check.why is Why.OWED)
        return frozenset(held.slot for held in owed if sampler_ids is None or held.sampler_id in sampler_ids)

    def next(self, places: VerifierPlaces, now: float) -> Held | None:
        """Return the group that a verifier is to be sent, and count it as sent; None: none now.

        Groups that are held back go first; of a sampler's groups, the oldest.
        """
        for waiting in (self._checks.waiting, self._checks.afterwards):
            sampler_id = places.choose(waiting.sampler_ids(but=places), now)
            if sampler_id is not None:
                check = self._checks.get(waiting.take(sampler_id, but=places))
                assert check is not None
                check.verifiers += 1
                places.send(check.held.group_id, sampler_id, now)
                return check.held
        return None

    def answered(self, name: str, now: float) -> Held | None:
        """Return a group that a verifier has answered for; None: it was not asked, or has answered before.

        It stays held until what the answer means is settled: ``let_go``.
        """
        check = self._checks.unanswered(name)
        if check is None or not check.verifiers:
            return None
        return self._answer(check, now)

    def ask_again(self, held: Held) -> None:
        """Put a group up for another check; its finding was lost before it was settled."""
        check = self._checks.get(held.group_id)
        if check is not None and check.answered_at_s is not None:
            check.answered_at_s, check.verifiers = None, 0
            self._checks.wait(check)

    def let_go(self, held: Held, *, is_checked: bool = False) -> None:
        """Let the learner have a group, whose check is over."""
        if (check := self._checks.get(held.group_id)) is not None:
            if is_checked:
                self.tally.note_checked(held.sampler_id)
            self._checks.end(check)

    def drop(self, slot: int, *, is_consumed: bool = False) -> None:
        """Note that nobody waits for a slot's group any more; one that was sent may still be found out.

        What was trained on unchecked is owed.
        """
        if (check := self._checks.of_slot(slot)) is None:
            return
        if not is_consumed:
            self._checks.become(check, Why.SENT)
        elif check.answered_at_s is not None:
            return
        elif check.why is Why.HELD:
            self._checks.become(check, Why.OWED if self._checks.may_owe(check.held) else Why.SENT)

    def left(self, group_ids: Iterable[str]) -> None:
        """Send another verifier what one had that has gone."""
        for name in group_ids:
            check = self._checks.unanswered(name)
            if check is not None and check.verifiers:
                check.verifiers -= 1
                if not check.verifiers and not self._checks.is_waiting(check):
                    self._checks.failed(check)

    def offer(self, name: str) -> None:
        """Ask another verifier about a group, too; the first to answer decides."""
        if (check := self._checks.unanswered(name)) is None:
            return
        if self._grades:
            self._checks.failed(check)
        else:
            self._checks.wait(check)

    def turned_late(self, name: str) -> Held | None:
        """Note that a group has turned late at a verifier that answers for others.

        Return it where that is no one verifier's doing: it has been late as often as there are others to ask.
        """
        if (check := self._checks.unanswered(name)) is None:
            return None
        check.held = replace(check.held, terms_late=check.held.terms_late + 1)
        return check.held if check.held.terms_late == self._verifiers_to_ask else None

    def put_off(self, name: str, now: float) -> bool:
        """Where verifiers grade, have a group graded a little later; return whether that is so."""
        check = self._checks.unanswered(name)
        if not self._grades or check is None or not check.verifiers:
            return False
        self._checks.stop_waiting(check)
        check.held, check.verifiers = replace(check.held, tries=0), 0
        check.put_off_until_s = now + PUT_OFF_S
        return True

    def hopeless(self, now: float) -> list[Held]:
        """Return, as answered for, the groups that too many verifiers have left unanswered."""
        return [
            self._answer(check, now)
            for check in self._checks
            if check.answered_at_s is None
            and (
                check.held.tries >= MOST_TRIES or check.held.terms_late >= MOST_TRIES * self._verifiers_to_ask
            )
        ]

    def turn(self, now: float) -> None:
        """Ask again where a finding never came to disk, or where a group was put off."""
        for check in self._checks:
            if check.answered_at_s is not None and now - check.answered_at_s > HELD_S:
                check.answered_at_s, check.verifiers = None, 0
                self._checks.wait(check)
            elif check.put_off_until_s is not None and now >= check.put_off_until_s:
                check.put_off_until_s = None
                self._checks.wait(check)

    def bound_times(self, now: float) -> None:
        """Hold no group from a time ahead: the clock was set back."""
        self._checks.bound_times(now, put_off_s=PUT_OFF_S)
        for places in self.verifiers:
            places.bound_times(now)

    def open(self) -> None:
        """Note that a verifier answers."""
        self.is_open = self.has_had_verifier = True

    def close(self) -> None:
        """Note that no verifier answers: deliver every group, which is owed, or have all wait."""
        self.is_open = False
        for check in self._checks if not self._is_required else ():
            if check.why is Why.HELD and check.answered_at_s is None:
                self.passed_over += 1
                self._checks.become(check, Why.OWED if self._checks.may_owe(check.held) else Why.SENT)

    def _pass_over(self, held: Held) -> None:
        """Deliver a group unchecked; check it afterwards, where there is room and the run has verifiers."""
        if not self.has_had_verifier:
            return
        self.passed_over += 1
        if self._checks.may_owe(held):
            self._checks.begin(held, Why.OWED)
        else:
            self.unkept += 1

    def _answer(self, check: OpenCheck, now: float) -> Held:
        self._checks.stop_waiting(check)
        check.answered_at_s, check.put_off_until_s = now, None
        check.held = replace(check.held, tries=0, terms_late=0)
        return check.held

    @property
    def _verifiers_to_ask(self) -> int:
        return min(MOST_TRIES, max(1, len(self.verifiers)))

    def _is_dear(self, sampler_id: str, now: float) -> bool:
        """Whether every verifier that knows a sampler finds its groups dear."""
        said = [places.is_dear(sampler_id, now) for places in self.verifiers]
        known = [is_dear for is_dear in said if is_dear is not None]
        return bool(known) and all(known)

    def _number(self, name: str) -> float:
        digest = hashlib.blake2b(name.encode(), key=self._secret, digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2.0**64
