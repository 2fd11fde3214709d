"""One verifier's places and time, shared out by sampler: whose group it is sent next; pure.

    waiting --choose--> at the verifier --answered--> the sampler is charged the seconds that it took
                              |--out of patience--> offered to other verifiers; it keeps its place here
                              '--late, while groups sent after it were answered--> counts against its sampler

A free place goes to the sampler that has used the least of this verifier's time lately. That alone would let
a crowd of slow ones fill every place at once, so samplers are told apart by what their groups take here:

    unknown   nothing was answered yet: one place each, a quarter of the places together
    dear      ``DEAR_FACTOR`` times what those of the cheapest sampler take, or here for longer than
              ``STUCK_S``: a quarter of the places together; with the unknown ones never more than three
              quarters, however many of those turn out to be stuck
    cheap     the others: whatever is free, a quarter each, where there are others: they may turn dear

Samplers are not counted for any of this: names cost an enemy little.

What is known of samplers is known of them at this verifier: a slow one makes nobody dear at another.
A verifier answers in about the order in which it was asked, so patience with a group begins anew with each
answer for a group that was sent before it. Answers for later ones are no progress for it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

DEAR_FACTOR: Final = 4.0
LEAST_DEAR_S: Final = 1.0
"""Below this nobody is dear: eight places would answer 8 groups a second."""

STUCK_S: Final = 5.0
"""A group that is at the verifier for longer tells how dear its sampler is before it is answered. Above the
time that a further grader process takes to start."""

FADING: Final = 1.0 - 1.0 / 8
"""The slowest group of a sampler is forgotten by this factor with each answer: 30 s after 26 quick ones."""

HALF_LIFE_S: Final = 60.0
"""Time used is forgotten at this rate."""

PATIENCE_FACTOR: Final = 4.0
LEAST_PATIENCE_S: Final = 10.0
LATE_FACTOR: Final = 2.0
"""A group is late after this many times the time that the verifier gives its grader."""

GRADING_LIMIT_S: Final = 30.0
"""Assumed where the verifier does not say it: ``grader_wall_limit_s`` by default."""


@dataclass(slots=True)
class _Use:
    """Time that a sampler has used here."""

    used_s: float = 0.0
    """As of ``at_s``; fading."""
    at_s: float = 0.0
    slowest_s: float | None = None
    """Its slowest group of late; None: none was answered yet."""


@dataclass(slots=True)
class _Sent:
    sampler_id: str
    sent_at_s: float
    since_s: float
    """When the verifier last answered for a group that it was sent before this one; at first, when sent."""
    is_overtaken: bool = False
    """Whether it has answered for one that it was sent later."""
    is_offered: bool = False
    """Whether it was told as out of patience."""
    terms_late: int = 0
    """How often it has turned late here."""


@dataclass(slots=True, eq=False)
class VerifierPlaces:
    """One stream's places."""

    places: int
    """Groups that it takes at once."""
    grades_at_once: int = 0
    """Groups that it can grade side by side; 0: as many as it takes."""
    grading_limit_s: float = GRADING_LIMIT_S
    is_patient: bool = False
    """Whether a group stays until it is late, because a second answer for it may cost money: it grades, and
    does not check."""
    answered_at_s: float | None = None
    """When it last answered anything; None: it has not."""
    _uses: dict[str, _Use] = field(default_factory=dict)
    _sent: dict[str, _Sent] = field(default_factory=dict)
    """By group id, in the order in which they were sent."""

    def __len__(self) -> int:
        """Return how many groups it has."""
        return len(self._sent)

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._sent

    @property
    def group_ids(self) -> tuple[str, ...]:
        return tuple(self._sent)

    def send(self, group_id: str, sampler_id: str, now: float) -> None:
        self._uses.setdefault(sampler_id, _Use(at_s=now))
        self._sent[group_id] = _Sent(sampler_id, now, now)

    def answer(self, group_id: str, now: float, *, graded_s: float | None = None) -> bool:
        """Take an answer in; return whether the verifier had the group.

        Args:
            graded_s: How long its grader worked, without the wait for a free one; None: it does not say.
        """
        self.answered_at_s = now
        if (sent := self._sent.get(group_id)) is None:
            return False
        is_before = True
        for name, other in self._sent.items():
            if name == group_id:
                is_before = False
            elif is_before:
                other.is_overtaken = True
            else:
                other.since_s = now
        del self._sent[group_id]
        at_verifier_s = max(0.0, now - sent.sent_at_s)
        is_said = graded_s is not None and 0 <= graded_s <= at_verifier_s
        took_s = graded_s if graded_s is not None and is_said else at_verifier_s
        use = self._uses[sent.sampler_id]
        use.used_s, use.at_s = self._faded(use, now) + took_s, now
        use.slowest_s = max(took_s, FADING * (use.slowest_s or 0.0))
        return True

    def take_back(self, group_id: str) -> None:
        """Forget that a group was sent: it could not be."""
        self._sent.pop(group_id, None)

    def choose(self, sampler_ids: Iterable[str], now: float) -> str | None:
        """Return whose group it is to be sent now, of samplers whose groups wait; None: nobody's."""
        if len(self._sent) >= self.places:
            return None
        unknown, dear = self._unknown(now), self._dear(now)
        under_way = Counter(sent.sampler_id for sent in self._sent.values())
        of_unknown = sum(n for name, n in under_way.items() if name in unknown)
        of_dear = sum(n for name, n in under_way.items() if name in dear)
        quarter = max(1, self._at_once // 4)
        is_cheap_place_left = of_unknown + of_dear < max(1, self._at_once - quarter)
        waiting = tuple(sampler_ids)
        is_alone = len(self._uses.keys() | set(waiting)) == 1

        def may_have_one(name: str) -> bool:
            is_unknown = name in unknown or name not in self._uses
            if is_alone and (self.is_patient or not is_unknown):
                return True
            if is_unknown:
                return is_cheap_place_left and of_unknown < quarter and not under_way[name]
            if name in dear:
                return is_cheap_place_left and of_dear < quarter
            return under_way[name] < max(1, self.places // (2 if self.is_patient else 4))

        allowed = [name for name in waiting if may_have_one(name)]
        return min(allowed, key=lambda name: (self._used_s(name, now), name), default=None)

    def is_dear(self, sampler_id: str, now: float) -> bool | None:
        """Return whether a sampler's groups are dear here; None: it is not known."""
        if sampler_id not in self._uses or sampler_id in self._unknown(now):
            return None
        return sampler_id in self._dear(now)

    def out_of_patience(self, now: float) -> list[str]:
        """Return the groups that others are to be asked about, each once."""
        found = []
        for group_id, sent in self._sent.items():
            if not sent.is_offered and now - sent.since_s > self._patience_s(sent.sampler_id):
                sent.is_offered = True
                found.append(group_id)
        return found

    def late(self, now: float) -> list[str]:
        """Return the groups that have turned late while the verifier answered for later ones, once a term."""
        found = []
        for group_id, sent in self._sent.items():
            if sent.is_overtaken and now - sent.since_s > (sent.terms_late + 1) * self.late_s:
                sent.terms_late += 1
                found.append(group_id)
        return found

    def is_silent(self, now: float) -> bool:
        """Whether it has groups, and has answered for none for so long that each is late."""
        if not self._sent:
            return False
        oldest_s = min(sent.sent_at_s for sent in self._sent.values())
        heard_s = oldest_s if self.answered_at_s is None else max(oldest_s, self.answered_at_s)
        return now - heard_s > self.late_s

    @property
    def late_s(self) -> float:
        return LATE_FACTOR * self.grading_limit_s

    def bound_times(self, now: float) -> None:
        """Let nothing have happened later than now: the clock was set back."""
        for sent in self._sent.values():
            sent.sent_at_s, sent.since_s = min(sent.sent_at_s, now), min(sent.since_s, now)
        for use in self._uses.values():
            use.at_s = min(use.at_s, now)
        if self.answered_at_s is not None:
            self.answered_at_s = min(self.answered_at_s, now)

    @property
    def _at_once(self) -> int:
        return min(self.places, self.grades_at_once or self.places)

    def _unknown(self, now: float) -> set[str]:
        """Return the samplers of which nothing was answered, and nothing is stuck."""
        return {
            name for name, use in self._uses.items() if use.slowest_s is None and not self._stuck_s(name, now)
        }

    def _dear(self, now: float) -> set[str]:
        """Return the samplers whose groups are dear."""
        slowest = {
            name: max(use.slowest_s or 0.0, self._stuck_s(name, now)) for name, use in self._uses.items()
        }
        answered = (slowest[name] for name, use in self._uses.items() if use.slowest_s is not None)
        limit_s = max(LEAST_DEAR_S, DEAR_FACTOR * min(answered, default=0.0))
        return {name for name, took_s in slowest.items() if took_s > limit_s}

    def _stuck_s(self, sampler_id: str, now: float) -> float:
        """Return how long a group of a sampler is here that has been for longer than ``STUCK_S``; 0: none."""
        at_s = [now - sent.sent_at_s for sent in self._sent.values() if sent.sampler_id == sampler_id]
        longest_s = max(at_s, default=0.0)
        return longest_s if longest_s > STUCK_S else 0.0

    def _patience_s(self, sampler_id: str) -> float:
        use = self._uses[sampler_id]
        if self.is_patient or use.slowest_s is None:
            return self.late_s
        return min(self.late_s, max(LEAST_PATIENCE_S, PATIENCE_FACTOR * use.slowest_s))

    def _used_s(self, sampler_id: str, now: float) -> float:
        """Return the time that a sampler has used here lately, with that of its groups under way."""
        use = self._uses.get(sampler_id)
        if use is None:
            return 0.0
        under_way = (now - sent.sent_at_s for sent in self._sent.values() if sent.sampler_id == sampler_id)
        return self._faded(use, now) + sum(under_way)

    @staticmethod
    def _faded(use: _Use, now: float) -> float:
        return float(use.used_s * 0.5 ** (max(0.0, now - use.at_s) / HALF_LIFE_S))
