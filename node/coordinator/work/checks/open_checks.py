"""The groups that are to be checked, why each is, and the room that they take by sampler; pure.

The room is shared out by sampler: each may use as much of it as is left free. One sampler alone fills half.
The more samplers fill it, the less each may have, and some of it is always left for one that comes later: of
k samplers that take all they may, each has 1 / (k + 1), and as much is free.
Source: dynamic thresholds, Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from node.coordinator.work.checks.check_queue import CheckQueue, Held
from node.coordinator.work.slots.slot import Slot, group_id

OWED_GROUPS: Final = 1024
"""Most groups to be checked afterwards: two minutes of a verifier that takes .1 s for each."""


class Why(enum.Enum):
    """Why a group is still to be checked."""

    HELD = "the learner is not sent it before"
    OWED = "it was delivered unchecked"
    SENT = "it is at a verifier, or was answered for, and nobody else wants it"


@dataclass(slots=True, eq=False)
class OpenCheck:
    held: Held
    why: Why
    verifiers: int = 0
    """How many have it."""
    answered_at_s: float | None = None
    """Since when what the answer means is not settled."""
    put_off_until_s: float | None = None


@dataclass(slots=True)
class SharedRoom:
    most: int
    total: int = 0
    _of: dict[str, int] = field(default_factory=dict)

    def of(self, name: str) -> int:
        """Return how much a peer uses."""
        return self._of.get(name, 0)

    def has_room(self, name: str, size: int = 1) -> bool:
        return self.of(name) + size <= self.most - self.total

    def take(self, name: str, size: int = 1) -> None:
        """Note that a peer uses so much more, which may be more than it should; below 0: less."""
        self._of[name] = self.of(name) + size
        self.total += size
        if not self._of[name]:
            del self._of[name]


class OpenChecks:
    """In memory only, but for the bytes of groups that are owed."""

    def __init__(self, *, most_held: int, most_owed_bytes: int) -> None:
        self._of: dict[str, OpenCheck] = {}
        """By group id."""
        self._of_slot: dict[int, str] = {}
        """Slot -> the group of it that is to be checked."""
        self.waiting, self.afterwards = CheckQueue(), CheckQueue()
        """Groups that are held back, and the others, which no verifier has."""
        self.held, self.owed = SharedRoom(most_held), SharedRoom(OWED_GROUPS)
        self._owed_bytes = SharedRoom(most_owed_bytes)

    def __iter__(self) -> Iterator[OpenCheck]:
        """Yield the checks; they may end meanwhile."""
        return iter(tuple(self._of.values()))

    def bound_times(self, now: float, *, put_off_s: float) -> None:
        """Hold no group from a time ahead: the clock was set back."""
        for check in self:
            check.held = replace(check.held, since_s=min(check.held.since_s, now))
            if check.answered_at_s is not None:
                check.answered_at_s = min(check.answered_at_s, now)
            if check.put_off_until_s is not None:
                check.put_off_until_s = min(check.put_off_until_s, now + put_off_s)

    def get(self, group_id: str) -> OpenCheck | None:
        return self._of.get(group_id)

    def unanswered(self, group_id: str) -> OpenCheck | None:
        """Return a group's check, if no verifier has answered for it yet."""
        check = self._of.get(group_id)
        return None if check is None or check.answered_at_s is not None else check

    def of_slot(self, slot: int) -> OpenCheck | None:
        return self._of.get(self._of_slot.get(slot, ""))

    def is_kept(self, slot: Slot) -> bool:
        """Whether the group of a consumed slot is still to be checked, and its bytes stay for that."""
        check = self.of_slot(slot.number)
        if check is None or check.held.group_id != group_id(slot.number, slot.winner):
            return False
        is_owed = check.why is Why.OWED or (check.why is Why.HELD and self.may_owe(check.held))
        return is_owed and check.answered_at_s is None

    def may_owe(self, held: Held) -> bool:
        has_room = self.owed.has_room(held.sampler_id)
        return has_room and self._owed_bytes.has_room(held.sampler_id, held.size_bytes)

    def begin(self, held: Held, why: Why) -> None:
        check = self._of[held.group_id] = OpenCheck(held, why)
        self._of_slot[held.slot] = held.group_id
        self._count(check, 1)
        self.wait(check)

    def become(self, check: OpenCheck, why: Why) -> None:
        """Let a group be checked for another reason, or not at all."""
        is_waiting = self.stop_waiting(check)
        self._count(check, -1)
        check.why = why
        self._count(check, 1)
        if why is Why.SENT and not check.verifiers and check.answered_at_s is None:
            self.end(check)
        elif is_waiting:
            self.wait(check)

    def failed(self, check: OpenCheck) -> None:
        """Put a group up again that a verifier has left unanswered."""
        check.held = replace(check.held, tries=check.held.tries + 1)
        self.wait(check)

    def wait(self, check: OpenCheck) -> None:
        if check.why is Why.SENT:
            if not check.verifiers:
                self.end(check)
            return
        (self.waiting if check.why is Why.HELD else self.afterwards).add(check.held)

    def is_waiting(self, check: OpenCheck) -> bool:
        return check.held in self.waiting or check.held in self.afterwards

    def stop_waiting(self, check: OpenCheck) -> bool:
        return self.waiting.discard(check.held) or self.afterwards.discard(check.held)

    def end(self, check: OpenCheck) -> None:
        self.stop_waiting(check)
        self._count(check, -1)
        del self._of[check.held.group_id]
        if self._of_slot.get(check.held.slot) == check.held.group_id:
            del self._of_slot[check.held.slot]

    def _count(self, check: OpenCheck, sign: int) -> None:
        name, size_bytes = check.held.sampler_id, sign * check.held.size_bytes
        match check.why:
            case Why.HELD:
                self.held.take(name, sign)
            case Why.OWED:
                self.owed.take(name, sign)
                self._owed_bytes.take(name, size_bytes)
