"""A slot: one intended use of one prompt, the attempts made at it, and when it is given up; pure.

    available --grant--> leased --submit--> spooled --accept--> accepted --train--> trained
        ^                  |                   |                    |
        |--expire/release/fail                 |                    |
        |-----------------refuse---------------'--------------------'

    where verifiers grade:  leased --submit--> ungraded --grade--> spooled; one may refuse it, too

        '-- once too many attempts have failed (below), instead: abandoned

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

A slot is of training, or of a held-out prompt that one version is asked. Numbers say which: those of training
count from 0, a held-out slot's follow from its version and its place among the slots of that version.

A lease that is given back unbegun leaves no trace. Every other attempt that came to nothing counts. After a
fault, which a sampler found, the slot waits a moment and goes to another sampler (see ``bad_prompts``); where
there is none, it is given up, and its prompt is asked again in the next epoch.
"""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from node.values.groups.failure import FAULTS, Failure
from node.values.groups.verdict import Verdict

_NUMBER: Final = "(0|[1-9][0-9]{0,15})"
_ATTEMPT: Final = r"\.([1-9][0-9]{0,8})"
_GROUP_ID: Final = re.compile(_NUMBER + _ATTEMPT)
_HELD_OUT_ID: Final = re.compile(f"e{_NUMBER}-{_NUMBER}{_ATTEMPT}")

HELD_OUT_FROM: Final = 1 << 52
"""Number of the first held-out slot of version 0; no run has as many slots of training."""

HELD_OUT_PLACES: Final = 1 << 13
"""Held-out slots that a version may have: twice ``coordinator.evaluation.prompts`` at its largest."""

MAX_ATTEMPTS: Final = 5
"""Attempts a slot may lose, to whatever: a prompt that kills every sampler, or whose groups nobody accepts,
must not go round for ever."""

MAX_WITNESSES: Final = 2
MAX_FAULTS: Final = 3
"""Faults a slot may have, of two samplers or in all: one may be the sampler's own, two samplers' are the
prompt's."""

FIRST_RETRY_S: Final = 1.0
"""Until a slot with a fault is leased again."""

SAME_SAMPLER_S: Final = 10.0
"""How much longer the sampler waits that had the fault: meanwhile others, where there are any, take it."""

WAIT_FOR_OTHERS_S: Final = 60.0
"""How long a slot whose prompt is kept from somebody waits for another sampler to ask for work."""


class SlotState(enum.StrEnum):
    """Where a slot is in its life. Closed: also the ``state`` label of metrics."""

    AVAILABLE = "available"
    LEASED = "leased"
    UNGRADED = "ungraded"
    """Its group waits for the rewards that a verifier works out."""
    SPOOLED = "spooled"
    ACCEPTED = "accepted"
    TRAINED = "trained"
    UNINFORMATIVE = "uninformative"
    """Its group was consumed in a batch that taught nothing; no step was taken."""
    ABANDONED = "abandoned"
    LOST = "lost"
    SKIPPED = "skipped"
    EVALUATED = "evaluated"
    """A held-out prompt's group counts in the score of its version. Never a slot of training."""


class SlotKind(enum.StrEnum):
    TRAIN = "train"
    HELD_OUT = "held_out"
    """Its group is scored, and the learner never sees it."""


SETTLED: Final = frozenset(
    {
        SlotState.TRAINED,
        SlotState.UNINFORMATIVE,
        SlotState.ABANDONED,
        SlotState.LOST,
        SlotState.SKIPPED,
        SlotState.EVALUATED,
    }
)
DELIVERABLE: Final = frozenset({SlotState.SPOOLED, SlotState.ACCEPTED})
UNTRAINED: Final = DELIVERABLE | {SlotState.UNGRADED}
CONSUMED: Final = frozenset({SlotState.TRAINED, SlotState.UNINFORMATIVE, SlotState.EVALUATED})


@dataclass(frozen=True, slots=True)
class Attempt:
    """One lease ever granted on a slot and not given back."""

    number: int
    holder: str
    is_submitted: bool = False
    failure: Failure | None = None
    """Why it failed; an expired one may still win."""


@dataclass(frozen=True, slots=True)
class HeldOutAnswer:
    """The group that won a held-out slot, in numbers."""

    reward_mean: float
    cut_completions: int
    tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The grader's metrics besides the reward, by name."""


@dataclass(frozen=True, slots=True)
class Slot:
    number: int
    prompt_index: int
    state: SlotState
    attempts: tuple[Attempt, ...]
    granted: int
    """Leases ever granted on it: the newest attempt's number."""
    winner: int = 0
    """Attempt whose group is ungraded, spooled, accepted, trained on or scored; 0 while there is none."""
    answer: HeldOutAnswer | None = None
    """A held-out slot's group in numbers, while it has won; None: none has, or the slot is of training."""

    @property
    def kind(self) -> SlotKind:
        return kind_of(self.number)

    @property
    def lease(self) -> Attempt | None:
        return self.attempts[-1] if self.state is SlotState.LEASED else None

    @property
    def last_failure(self) -> Failure | None:
        return next((a.failure for a in reversed(self.attempts) if a.failure is not None), None)

    def had_fault(self, holder: str | None = None) -> bool:
        """Whether a sampler, or this one, found a fault with its prompt."""
        return any(a.failure in FAULTS and holder in (None, a.holder) for a in self.attempts)

    @property
    def winning_holder(self) -> str:
        """The sampler whose group won; empty while none has."""
        winner = self.attempt(self.winner)
        return "" if winner is None else winner.holder

    def attempt(self, number: int) -> Attempt | None:
        return next((attempt for attempt in self.attempts if attempt.number == number), None)

    def leased_to(self, holder: str) -> "Slot":
        """Return it under a new lease."""
        number = self.granted + 1
        attempts = (*self.attempts, Attempt(number, holder))
        return replace(self, state=SlotState.LEASED, granted=number, attempts=attempts)

    def with_submission(self, number: int) -> "Slot":
        return replace(self, attempts=self._attempts_with(number, is_submitted=True))

    def with_failure(self, number: int, failure: Failure) -> "Slot":
        return replace(self, attempts=self._attempts_with(number, failure=failure))

    def won(self, attempt: int, *, is_graded: bool, answer: HeldOutAnswer | None) -> "Slot":
        """Return it as an attempt wins it; ``answer``: what a held-out prompt's group says."""
        state = SlotState.SPOOLED if is_graded else SlotState.UNGRADED
        attempts = self._attempts_with(attempt, is_submitted=True)
        return Slot(self.number, self.prompt_index, state, attempts, self.granted, attempt, answer)

    def spent(self, attempt: int) -> "Slot":
        """Return it after an attempt brought a group that nobody can use."""
        entry = self.with_submission(attempt).with_failure(attempt, Failure.REFUSED)
        is_running = self.lease is not None and self.lease.number == attempt
        return reopened(entry) if is_running else entry

    def refused(self) -> "Slot":
        """Return it up for another attempt: its group is refused."""
        return reopened(self.with_failure(self.winner, Failure.REFUSED))

    def taken_back(self) -> "Slot":
        """Return it refused on another's word than the learner's, which may be training on its group.

        One that would be abandoned for it is lost instead: a step record that is on its way may name it.
        """
        entry = self.refused()
        is_given_up = entry.state is SlotState.ABANDONED and self.kind is SlotKind.TRAIN
        return replace(entry, state=SlotState.LOST) if is_given_up else entry

    def judged(self, verdict: Verdict) -> "Slot | None":
        """Return it after the learner's verdict on its group; None: the verdict changes nothing."""
        if self.state is SlotState.UNGRADED:
            return None
        match verdict:
            case Verdict.ACCEPTED:
                is_known = self.state is SlotState.ACCEPTED
                return None if is_known else replace(self, state=SlotState.ACCEPTED)
            case Verdict.DUPLICATE:  # trained on before
                return replace(self, state=SlotState.LOST, winner=0)
            case Verdict.UNINFORMATIVE:
                return replace(self, state=SlotState.UNINFORMATIVE)
            case _:
                return self.refused()

    def _attempts_with(self, number: int, **changes: Any) -> tuple[Attempt, ...]:
        return tuple(replace(one, **changes) if one.number == number else one for one in self.attempts)


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


NO_SLOTS: Final = SlotBalance()


def kind_of(number: int) -> SlotKind:
    return SlotKind.TRAIN if number < HELD_OUT_FROM else SlotKind.HELD_OUT


def held_out_number(version: int, place: int) -> int:
    """Return the number of a held-out slot of a version; ``place`` is below ``HELD_OUT_PLACES``."""
    return HELD_OUT_FROM + version * HELD_OUT_PLACES + place


def version_and_place(number: int) -> tuple[int, int]:
    """Return which version a held-out slot is of, and its place among that version's slots."""
    return divmod(number - HELD_OUT_FROM, HELD_OUT_PLACES)


def group_id(slot: int, attempt: int) -> str:
    """Return the id of a group and its lease: ``<slot>.<attempt>``, ``e<version>-<place>.<attempt>``."""
    if kind_of(slot) is SlotKind.TRAIN:
        return f"{slot}.{attempt}"
    version, place = version_and_place(slot)
    return f"e{version}-{place}.{attempt}"


def parse_group_id(text: str) -> tuple[int, int] | None:
    """Return (slot, attempt); None where ``text`` is not the id of a group for training."""
    match = _GROUP_ID.fullmatch(text)
    if match is None or kind_of(int(match[1])) is SlotKind.HELD_OUT:
        return None
    return int(match[1]), int(match[2])


def parse_held_out_id(text: str) -> tuple[int, int] | None:
    """Return (slot, attempt); None where ``text`` is not the id of a held-out prompt's group."""
    match = _HELD_OUT_ID.fullmatch(text)
    if match is None or int(match[2]) >= HELD_OUT_PLACES:
        return None
    return held_out_number(int(match[1]), int(match[2])), int(match[3])


def is_held_out(lease_id: str) -> bool:
    """Whether it can only be the id of a held-out slot's lease or group: others begin with a digit."""
    return lease_id.startswith("e")


def slot_and_attempt(text: str) -> tuple[int, int]:
    """Return the (slot, attempt) of a group of either kind; a slot that does not exist for any other text."""
    return parse_group_id(text) or parse_held_out_id(text) or (-1, 0)


def reopened(slot: Slot) -> Slot:
    """Return a slot whose attempt failed as it goes on: available, or abandoned after too many."""
    witnesses = [attempt.holder for attempt in slot.attempts if attempt.failure in FAULTS]
    has_failed = len(set(witnesses)) >= MAX_WITNESSES or len(witnesses) >= MAX_FAULTS
    is_spent = has_failed or len(slot.attempts) >= MAX_ATTEMPTS
    state = SlotState.ABANDONED if is_spent else SlotState.AVAILABLE
    return replace(slot, state=state, winner=0, answer=None)
