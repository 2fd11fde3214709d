"""A slot: one intended use of one prompt, the attempts made at it, and when it is given up; pure.

A slot is of training, or of a held-out prompt that one version is asked. Numbers say which: those of training
count from 0, a held-out slot's follow from its version and its place among the slots of that version.

A lease that is given back unbegun leaves no trace. Every other attempt that came to nothing counts. After a
fault, which a sampler found, the slot waits a moment and goes to another sampler (see ``bad_prompts``); where
there is none, it is given up, and its prompt is asked again in the next epoch. The rest of a slot's life is
in ``slot_table``.
"""

import enum
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from node.failure import FAULTS, Failure

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

_ROUNDS: Final = 4
"""Luby-Rackoff: four Feistel rounds of a good function are a strong permutation."""


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
        return self._with(number, is_submitted=True)

    def with_failure(self, number: int, failure: Failure) -> "Slot":
        return self._with(number, failure=failure)

    def _with(self, number: int, **changes: Any) -> "Slot":
        attempts = (replace(a, **changes) if a.number == number else a for a in self.attempts)
        return replace(self, attempts=tuple(attempts))


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


def prompt_of_slot(
    slot: int, *, prompts: int, seed: int, first_slot: int = 0, held_out: range = range(0)
) -> int:
    """Return the prompt that a slot asks for: a number below ``prompts``, those held out left out.

    Where prompts were added, the slots from ``first_slot`` on begin another epoch, of all of them. Otherwise
    slots [e * prompts, (e + 1) * prompts) are epoch e: a permutation of all prompts, by a
    Feistel network over the next even number of bits; results out of range are permuted again
    (cycle walking, fewer than four turns on average).
    """
    epoch, place = divmod(slot - first_slot, prompts)
    half_bits = max(1, ((prompts - 1).bit_length() + 1) // 2)
    turn = f"{seed}/{epoch}" if not first_slot else f"{seed}/{first_slot}/{epoch}"
    key = hashlib.blake2b(turn.encode(), digest_size=32).digest()
    while True:
        place = _permuted(place, half_bits, key)
        if place < prompts:
            return place if place < held_out.start else place + len(held_out)


def _permuted(value: int, half_bits: int, key: bytes) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(_ROUNDS):
        message = number.to_bytes(1) + right.to_bytes(8)
        digest = hashlib.blake2b(message, key=key, digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest) & mask)
    return left << half_bits | right
