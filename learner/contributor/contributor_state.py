"""Decides what a contributor does next, from what it holds, has trained on and has handed in; pure.

    group     dealt --> held --batch full--> trained --hand in--> travels --answer--> merged, or refused
                         '-- taken back: dropped

    due       when
    adopt     the answer is there and so are the words of that version; or nothing travels and a newer version
              is there (after the first batch of a round: one so new that this round would be refused)
    hand in   ``local_steps`` batches were taken since the last time, and nothing travels
    train     a batch is full; with overlap ``wait`` only while nothing travels
    wait      else, for what is named

A contribution travels until its version is adopted, so that there is never a second one. What is not known to
have arrived is said again on the next stream: which groups are here, and the contribution under way.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from learner.contributor.terms import Terms
from node.clients.contributions.contribute_stream import OwedToLearner
from node.values.contribution import Contribution, ContributionAnswer, MergeTerms
from node.values.groups.rollout import EncodedGroup

LEARNER: Final = "learner that merges"
GROUPS: Final = "groups dealt"
MERGED: Final = "merged version"


@dataclass(frozen=True, slots=True)
class Train:
    """Take a step on a batch."""

    batch: tuple[EncodedGroup, ...]


@dataclass(frozen=True, slots=True)
class HandIn:
    """Hand in what the batches since the last time made of the masters."""

    number: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """Go over to a version whose words are here."""

    version: int
    is_refused: bool = False
    """Whether what was handed in is not in it, and is to be forgotten."""


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Nothing is to be done before something changes."""

    what: str


@dataclass(frozen=True, slots=True)
class Leave:
    """The contributor is to stop, and nothing is left that it could hand in."""


Move = Train | HandIn | Adopt | WaitFor | Leave


class ContributorState:
    """One per process. Each move that ``next_move`` returns is reported once it is done."""

    def __init__(self, *, numbered_after: int = 0) -> None:
        """Begin at version 0, without terms and without groups.

        Args:
            numbered_after: numbers of contributions begin above it: above those of the process before.
        """
        self.terms: Terms | None = None
        self.version = 0
        """The version that the next contribution is measured from."""
        self._first_version = 0
        self._available = 0
        self._held: dict[str, EncodedGroup] = {}
        self._trained: list[str] = []
        self._batches = 0
        self._number = numbered_after
        self._travelling: Contribution | None = None
        self._travelling_ids: tuple[str, ...] = ()
        self._answer: ContributionAnswer | None = None
        """To the newest contribution, which masters do not follow yet."""
        self._is_owed = False
        self._credit_outstanding = 0
        """Below 0 where known groups have come to one that has no room."""

    @property
    def held_group_ids(self) -> tuple[str, ...]:
        """Every group that is here, in whatever state, for a stream's hello."""
        return (*self._travelling_ids, *self._trained, *self._held)

    @property
    def held_groups(self) -> int:
        """How many groups wait for a step, or are being trained on."""
        return len(self._held)

    @property
    def travelling_group_ids(self) -> tuple[str, ...]:
        """Groups of the contribution that was not answered."""
        return self._travelling_ids

    @property
    def is_idle(self) -> bool:
        """Whether nothing travels, and no version is waited for that has what was handed in."""
        return self._travelling is None and self._answer is None

    def connected(self) -> None:
        """Begin a new stream: credits are void, and the contribution under way is owed again."""
        self._credit_outstanding = 0
        self._is_owed = self._travelling is not None

    def take_owed(self) -> OwedToLearner:
        """Return what to send now, and count it as sent; nothing before there are terms."""
        if self.terms is None:
            return OwedToLearner(0, None)
        credit = max(0, self._room(self.terms) - len(self._held) - self._credit_outstanding)
        contribution = self._travelling if self._is_owed else None
        self._credit_outstanding += credit
        self._is_owed = False
        return OwedToLearner(credit, contribution)

    def starts_from(self, version: int) -> None:
        """Take no step before this version is here: the run's newest, as told at the first join."""
        self._first_version = version

    def told(self, terms: MergeTerms) -> None:
        """Note the learner's terms. Raises StartupError: as ``Terms.of``."""
        self.terms = Terms.of(terms)

    def has_room_for(self, group_id: str) -> bool:
        """Whether a delivery is within the credits; one that is known already takes no room."""
        return self._credit_outstanding > 0 or group_id in self.held_group_ids

    def delivered(self, group: EncodedGroup) -> None:
        """Note a group that was dealt to this contributor; one that is known may come again.

        Either used a credit at the learner. That of a known one is granted anew, since it takes no room.
        """
        self._credit_outstanding -= 1
        if group.group_id not in self.held_group_ids:
            self._held[group.group_id] = group

    def taken(self, group_ids: Iterable[str]) -> None:
        """Drop groups that are dealt to others now.

        Those trained on stay: the learner refuses their contribution, whose other groups are dealt again.
        """
        for group_id in group_ids:
            self._held.pop(group_id, None)

    def answered(self, answer: ContributionAnswer) -> bool:
        """Note an answer; return whether it is one to the contribution under way."""
        if self._travelling is None or self._travelling.number != answer.number:
            return False
        self._travelling, self._is_owed, self._travelling_ids = None, False, ()
        if answer.merged_version is None or answer.merged_version > self.version:
            self._answer = answer
        return True

    def available(self, version: int) -> None:
        """Note the newest version whose words are here."""
        self._available = version

    def trained(self, group_ids: Sequence[str]) -> None:
        """Note that a batch was trained on, whatever came of it."""
        self.taken(group_ids)
        self._trained += group_ids
        self._batches += 1

    def handed_in(self, contribution: Contribution) -> None:
        """Note the contribution that was made of all batches since the last one."""
        self._number = contribution.number
        self._travelling, self._is_owed = contribution, True
        self._travelling_ids, self._trained, self._batches = tuple(self._trained), [], 0

    def adopted(self, version: int) -> None:
        """Note that masters are measured from ``version`` now."""
        self.version, self._answer = version, None

    def next_move(self, *, is_stopping: bool = False) -> Move:
        """Return what to do now."""
        terms = self.terms
        if is_stopping:
            return self._last_move()
        if terms is None:
            return WaitFor(LEARNER)
        if self._is_adoptable(terms):
            is_refused = self._answer is not None and self._answer.merged_version is None
            return Adopt(self._available, is_refused)
        if self._first_version > self.version and self.is_idle:
            return WaitFor(MERGED)
        is_round_full = self._batches >= terms.merge.local_steps
        if is_round_full and self.is_idle:
            return HandIn(self._number + 1)
        if not self.is_idle and (is_round_full or terms.merge.overlap == "wait"):
            return WaitFor(MERGED)
        if len(self._held) < terms.batch_groups:
            return WaitFor(GROUPS)
        return Train(tuple(self._held.values())[: terms.batch_groups])

    def _last_move(self) -> Move:
        if self._travelling is not None:
            return WaitFor(MERGED)
        if self._batches and self._answer is None:
            return HandIn(self._number + 1)
        return Leave()

    def _is_adoptable(self, terms: Terms) -> bool:
        """Whether masters are to go over to the newest version that is here."""
        if self._answer is not None:
            return self._available >= (self._answer.merged_version or 0)
        rounds_behind = terms.merge.late_rounds if self._batches else 0
        return self._travelling is None and self._available - self.version > rounds_behind

    def _room(self, terms: Terms) -> int:
        """Return how many groups may be held: the next batch, and one more while steps are taken."""
        waits = not self.is_idle and terms.merge.overlap == "wait"
        return terms.batch_groups * (1 if waits else 2)
