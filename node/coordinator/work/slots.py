"""A slot: one intended use of one prompt, and the attempts made at it; values only.

What may become of a slot, and when, is decided in ``leases``.
"""

import enum
import re
from dataclasses import dataclass, replace
from typing import Any, Final

from node.failure import FAULTS, Failure

_GROUP_ID: Final = re.compile(r"(0|[1-9][0-9]{0,15})\.([1-9][0-9]{0,8})")


class SlotState(enum.StrEnum):
    """Where a slot is in its life. Closed: also the ``state`` label of metrics."""

    AVAILABLE = "available"
    LEASED = "leased"
    SPOOLED = "spooled"
    ACCEPTED = "accepted"
    TRAINED = "trained"
    UNINFORMATIVE = "uninformative"
    """Its group was consumed in a batch that taught nothing; no step was taken."""
    ABANDONED = "abandoned"
    LOST = "lost"
    SKIPPED = "skipped"
    EVALUATED = "evaluated"
    """Of a held-out prompt: its group is counted. See ``evaluations``; never a slot of training."""


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
UNTRAINED: Final = frozenset({SlotState.SPOOLED, SlotState.ACCEPTED})


@dataclass(frozen=True, slots=True)
class Attempt:
    """One lease ever granted on a slot and not given back."""

    number: int
    holder: str
    is_submitted: bool = False
    """Whether its group arrived: any other group of this id is a duplicate."""
    failure: Failure | None = None
    """Why it failed; an expired one may still win."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One intended use of one prompt."""

    number: int
    prompt_index: int
    state: SlotState
    attempts: tuple[Attempt, ...]
    granted: int
    """Leases ever granted on it: the newest attempt's number."""
    winner: int = 0
    """Attempt whose group is spooled, accepted or trained on; 0 while there is none."""

    @property
    def lease(self) -> Attempt | None:
        """The attempt that is running."""
        return self.attempts[-1] if self.state is SlotState.LEASED else None

    @property
    def last_failure(self) -> Failure | None:
        """Why its newest failed attempt failed."""
        return next((a.failure for a in reversed(self.attempts) if a.failure is not None), None)

    def had_fault(self, holder: str | None = None) -> bool:
        """Whether a sampler, or this one, found a fault with its prompt."""
        return any(a.failure in FAULTS and holder in (None, a.holder) for a in self.attempts)

    def attempt(self, number: int) -> Attempt | None:
        return next((attempt for attempt in self.attempts if attempt.number == number), None)

    def with_submission(self, number: int) -> "Slot":
        """Return the slot with the group of an attempt arrived."""
        return self._with(number, is_submitted=True)

    def with_failure(self, number: int, failure: Failure) -> "Slot":
        """Return the slot with a failed attempt."""
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
