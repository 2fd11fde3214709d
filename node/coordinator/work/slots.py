"""A slot: one intended use of one prompt, the attempts made at it, and when it is given up; pure.

A lease that is given back unbegun leaves no trace. Every other attempt that came to nothing counts. After a
fault, which a sampler found, the slot waits a moment and goes to another sampler (see ``bad_prompts``); where
there is none, it is given up, and its prompt is asked again in the next epoch. The rest of a slot's life is
in ``slot_table``.
"""

import enum
import hashlib
import re
from dataclasses import dataclass, replace
from typing import Any, Final

from node.failure import FAULTS, Failure

_GROUP_ID: Final = re.compile(r"(0|[1-9][0-9]{0,15})\.([1-9][0-9]{0,8})")


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
    """A held-out prompt's group was counted. Never a slot of training."""


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
CONSUMED: Final = frozenset({SlotState.TRAINED, SlotState.UNINFORMATIVE})


@dataclass(frozen=True, slots=True)
class Attempt:
    """One lease ever granted on a slot and not given back."""

    number: int
    holder: str
    is_submitted: bool = False
    failure: Failure | None = None
    """Why it failed; an expired one may still win."""


@dataclass(frozen=True, slots=True)
class Slot:
    number: int
    prompt_index: int
    state: SlotState
    attempts: tuple[Attempt, ...]
    granted: int
    """Leases ever granted on it: the newest attempt's number."""
    winner: int = 0
    """Attempt whose group is ungraded, spooled, accepted or trained on; 0 while there is none."""

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

    def with_submission(self, number: int) -> "Slot":
        return self._with(number, is_submitted=True)

    def with_failure(self, number: int, failure: Failure) -> "Slot":
        return self._with(number, failure=failure)

    def _with(self, number: int, **changes: Any) -> "Slot":
        attempts = (replace(a, **changes) if a.number == number else a for a in self.attempts)
        return replace(self, attempts=tuple(attempts))


def group_id(slot: int, attempt: int) -> str:
    return f"{slot}.{attempt}"


def parse_group_id(text: str) -> tuple[int, int] | None:
    """Return (slot, attempt); None where ``text`` is not the id of a group or lease."""
    match = _GROUP_ID.fullmatch(text)
    return (int(match[1]), int(match[2])) if match else None


def slot_and_attempt(text: str) -> tuple[int, int]:
    """As ``parse_group_id``; a slot that does not exist where ``text`` is no such id."""
    return parse_group_id(text) or (-1, 0)


def reopened(slot: Slot) -> Slot:
    """Return a slot whose attempt failed as it goes on: available, or abandoned after too many."""
    witnesses = [attempt.holder for attempt in slot.attempts if attempt.failure in FAULTS]
    has_failed = len(set(witnesses)) >= MAX_WITNESSES or len(witnesses) >= MAX_FAULTS
    is_spent = has_failed or len(slot.attempts) >= MAX_ATTEMPTS
    return replace(slot, state=SlotState.ABANDONED if is_spent else SlotState.AVAILABLE, winner=0)


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
