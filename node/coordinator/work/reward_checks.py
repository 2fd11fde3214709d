"""Which groups have their rewards worked out again, and what that proves; pure.

    spooled --drawn by a secret--> held --> sent to a verifier --> answered --finding on disk--> settled
       |                            |<---------- | ----------------------'-- not written: asked again
       |                            |            '-- no finding in time: delivered, unchecked
       |                            '-- no verifier has room in time, or none is left: delivered, unchecked
       '-- not drawn, or too many are held: delivered

A group that is held back waits for no other, and no other waits for it. The share that is drawn follows the
sampler's record: every group of a newcomer, so that it moves nothing unchecked, and soon one in twelve while
its checks agree. Nobody can tell which: the draw is a keyed hash of the group's id, and the key never leaves
this process. While too many groups are held, newcomers are told to come back.

Where a verifier is required, no group goes on unchecked for want of one: all wait, and those that were drawn
are asked for again until there is an answer.

Where verifiers grade, every group waits for grades, and none goes on without. It is at one verifier at a
time: it goes to another as soon as the first has gone, or has answered nothing for ``HELD_S``. A group that
``MOST_TRIES`` verifiers have left unanswered may be what ends them, and is given up.

Where the grader is deterministic, one group with other rewards is proof. Where honest samplers may differ in
a share of their groups, checks are bets against "it differs no more often than that": the stake grows by
``LYING_SHARE`` over that share with each difference, shrinks a little with each agreement, and is spread over
all moments at which a sampler may begin to lie. An honest sampler's stake reaches 1 / ``FALSE_ALARM`` in a
whole run with probability ``FALSE_ALARM`` at most (Ville's inequality).
"""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Container, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

Key = TypeVar("Key", bound=Hashable)

LEAST_SHARE: Final = 0.08
"""A proven sampler that lies in a part b of its groups is found within 37 / b of them, 19 times in 20, and
after 12.5 / b on average. At 0.1 the honest run of ``bench.cheats`` at 40 versions spent 4.05 % of the
fleet's CPU time on checks, in proportion to their number."""

PROVEN_CHECKS: Final = 4
"""Checks after which a sampler is no newcomer; its share then falls as the cube of their number, since most
of what checks cost was samplers between the first check and the last share."""

HELD_GROUPS: Final = 64
"""Proven samplers' groups beyond them are delivered unchecked."""

HELD_S: Final = 60.0
"""Twice what a grader may take for one group by default."""

MOST_TRIES: Final = 3
"""Times that a group is sent to be graded and not answered for."""

PUT_OFF_S: Final = 10.0
"""Until a group is sent again whose grader could not be asked, such as a judge that is away."""

FALSE_ALARM: Final = 0.01
LYING_SHARE: Final = 0.25
"""Share of differing groups that the bet wins most on."""


def checked_share(checks: int, differing: int) -> float:
    """Return the share of a sampler's groups to check, when so many were and ``differing`` of them differed.

    Each difference, which a grader that is not deterministic may make, takes back the record of a newcomer.
    """
    record = checks - PROVEN_CHECKS * differing
    return max(LEAST_SHARE, min(1.0, (PROVEN_CHECKS / max(1, record)) ** 3))


def stake_after(stake: float, *, checks: int, differs: bool, noise_ratio: float) -> float:
    """Return the stake against a sampler after one more check.

    Args:
        checks: How many there were before.
        noise_ratio: Share of an honest sampler's groups that differ, at most; below ``LYING_SHARE``.
    """
    begins_now = 1.0 / ((checks + 1) * (checks + 2))
    if differs:
        odds = LYING_SHARE / noise_ratio if noise_ratio else math.inf
    else:
        odds = (1.0 - LYING_SHARE) / (1.0 - noise_ratio)
    return (stake + begins_now) * odds


def is_proof(stake: float) -> bool:
    return stake * FALSE_ALARM >= 1.0


@dataclass(frozen=True, slots=True)
class Held:
    """A group that waits for a check or is being checked."""

    slot: int
    group_id: str
    sampler_id: str
    since_s: float
    tries: int = field(default=0, compare=False)
    """Times it was sent since the last answer."""


class RewardChecks:
    """The groups being checked, in memory only: what waited when the process ended is delivered unchecked, or
    drawn again where a verifier is required or grades."""

    def __init__(self, secret: bytes, *, is_required: bool = False, grades: bool = False) -> None:
        self._secret = secret
        self._grades = grades
        self._is_required = is_required or grades
        self._waiting: OrderedDict[int, Held] = OrderedDict()
        self._sent: dict[str, Held] = {}
        """By group id; some may have been delivered since."""
        self._answered: dict[str, Held] = {}
        """By group id; what the answers mean is not settled yet."""
        self._held: dict[int, str] = {}
        """Slot -> the group that is held back."""
        self.is_open = False
        """Whether there is a verifier."""
        self.passed_over = 0
        """Groups that were drawn and not held, because too many were."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def is_full(self) -> bool:
        """Whether so many groups are held that newcomers have to wait; where verifiers grade, the buffer's
        bounds are all."""
        return not self._grades and len(self._held) >= HELD_GROUPS

    @property
    def lacks_verifier(self) -> bool:
        """Whether every group is held because a verifier is required and there is none."""
        return self._is_required and not self.is_open and not self._grades

    def is_held(self, slot: int) -> bool:
        return slot in self._held or self.lacks_verifier

    def draw(self, slot: int, group_id: str, sampler_id: str, *, share: float, now: float) -> None:
        """Hold a group that was just spooled back, if it is drawn."""
        if not (self.is_open or self._is_required) or self._number(group_id) >= share:
            return
        if self.is_full and not self._is_required:
            self.passed_over += 1
            return
        self._held[slot] = group_id
        self._waiting[slot] = Held(slot, group_id, sampler_id, now)

    def next(self, *, but: Container[str] = ()) -> Held | None:
        """Return the group that has waited longest, and count it as sent; None: none waits.

        Those whose ids are in ``but`` are passed over.
        """
        slot = next((slot for slot, held in self._waiting.items() if held.group_id not in but), None)
        if slot is None:
            return None
        held = self._waiting.pop(slot)
        self._sent[held.group_id] = held = replace(held, tries=held.tries + 1)
        return held

    def answered(self, group_id: str) -> Held | None:
        """Return a group that a verifier has answered for; None: it was not asked, or has answered before.

        It stays held until what the answer means is settled: ``let_go``.
        """
        if (held := self._sent.pop(group_id, None)) is not None:
            self._answered[group_id] = held = replace(held, tries=0)
            if (waiting := self._waiting.get(held.slot)) is not None and waiting.group_id == group_id:
                del self._waiting[held.slot]
        return held

    def ask_again(self, held: Held) -> None:
        """Put a group up for another check; its finding was lost before it was settled."""
        if not (self.is_open or self._is_required):
            self.let_go(held)
        elif self._answered.pop(held.group_id, None):
            self._wait_again(held)

    def let_go(self, held: Held) -> None:
        """Let the learner have a group."""
        self._answered.pop(held.group_id, None)
        if self._held.get(held.slot) == held.group_id:
            self.drop(held.slot)

    def drop(self, slot: int) -> None:
        """Forget a group that is not wanted any more; one that was sent may still be found out."""
        self._waiting.pop(slot, None)
        self._held.pop(slot, None)

    def renew(self, group_ids: Iterable[str], now: float) -> None:
        """Where verifiers grade, let a verifier keep what it has: it has answered for another group."""
        for group_id in group_ids if self._grades else ():
            if (held := self._sent.get(group_id)) is not None:
                self._sent[group_id] = replace(held, since_s=max(held.since_s, now))

    def left(self, group_ids: Iterable[str]) -> None:
        """Send another verifier what one had that has gone.

        Where none grades, a group that ``MOST_TRIES`` have left is late rather than sent to the next.
        """
        for group_id in group_ids:
            held = self._sent.get(group_id)
            if held is not None and (self._grades or held.tries < MOST_TRIES):
                del self._sent[group_id]
                self._wait_again(held)

    def put_off(self, group_id: str, now: float) -> bool:
        """Where verifiers grade, have a group graded a little later; return whether that is so."""
        held = self._sent.get(group_id) if self._grades else None
        if held is not None:
            self._sent[group_id] = replace(held, since_s=now + PUT_OFF_S - HELD_S, tries=0)
        return held is not None

    def hopeless(self) -> list[Held]:
        """Return, as answered for, the groups that too many verifiers have left unanswered."""
        given_up = [held for held in self._waiting.values() if held.tries >= MOST_TRIES and self._grades]
        for held in given_up:
            del self._waiting[held.slot]
            self._sent.pop(held.group_id, None)
            self._answered[held.group_id] = replace(held, tries=0)
        return given_up

    def late(self, now: float) -> int:
        """Let groups go that have been held for too long; return how many. Where a verifier is required, ask
        for those again that one has been sent, or has answered for and gone before that was on disk."""
        if self._is_required:
            for held in [held for held in self._sent.values() if now - held.since_s > HELD_S]:
                self._sent[held.group_id] = again = replace(held, since_s=now)
                self._wait_again(again)
            for held in [held for held in self._answered.values() if now - held.since_s > HELD_S]:
                del self._answered[held.group_id]
                self._wait_again(replace(held, since_s=now))
            return 0
        asked = (*self._waiting.values(), *self._sent.values(), *self._answered.values())
        due = [held for held in asked if now - held.since_s > HELD_S]
        were_held = sum(self._held.get(held.slot) == held.group_id for held in due)
        for held in due:
            self.let_go(held)
            if now - held.since_s > 2 * HELD_S:
                self._sent.pop(held.group_id, None)
        return were_held

    def bound_times(self, now: float) -> None:
        """Hold no group from a time ahead: the clock was set back."""
        self._waiting.update(_held_by(self._waiting, now))
        self._sent.update(_held_by(self._sent, now))
        self._answered.update(_held_by(self._answered, now))

    def close(self) -> None:
        """Note that no verifier is left: let every group go, or have those wait that were sent."""
        self.is_open = False
        if not self._is_required:
            self.forget()
        for held in self._sent.values():
            self._wait_again(held)
        self._sent.clear()

    def forget(self) -> None:
        """Let every group go that is not answered for."""
        self._waiting.clear()
        self._sent.clear()
        self._held = {slot: name for slot, name in self._held.items() if name in self._answered}

    def _wait_again(self, held: Held) -> None:
        if self._held.get(held.slot) == held.group_id:
            self._waiting[held.slot] = held

    def _number(self, group_id: str) -> float:
        digest = hashlib.blake2b(group_id.encode(), key=self._secret, digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2.0**64


def _held_by(groups: Mapping[Key, Held], now: float) -> dict[Key, Held]:
    """Return groups as held since ``now`` at the latest."""
    return {key: replace(held, since_s=min(held.since_s, now)) for key, held in groups.items()}
