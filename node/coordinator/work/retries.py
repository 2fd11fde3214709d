"""When a slot whose attempt failed is leased again, and when it is abandoned; pure.

A lease that is given back unbegun leaves no trace. Every other attempt that came to nothing counts. After a
fault, which a sampler found, the slot waits before it is leased again, and longer for the sampler that had
the fault, so that another tries it.
"""

from dataclasses import replace
from typing import Final

from node.coordinator.work.slots import Slot, SlotState
from node.failure import FAULTS, Failure

MAX_ATTEMPTS: Final = 5
"""Attempts a slot may lose, to whatever: a prompt that kills every sampler, or whose groups nobody accepts,
must not go round for ever."""

MAX_FAULTS: Final = 2
"""Attempts a slot may lose to faults that a sampler found: one may be the sampler's own, two are the
prompt's."""

FINAL_FAULTS: Final = frozenset(
    {Failure.PROMPT_TOO_LONG, Failure.PROMPT_TIMED_OUT, Failure.GRADING_TIMED_OUT}
)
"""Faults of which one is enough. Too long is too long for everybody. What timed out has held a process for
as long as it may; the prompt is tried again when it comes back, and not at once at the same price."""

FIRST_RETRY_S: Final = 1.0
"""Until a slot with one fault is leased again; twice as long after each further one."""

SAME_SAMPLER_S: Final = 10.0
"""How much longer the sampler waits that had the fault: meanwhile others, where there are any, take it."""


def retry_after_s(slot: Slot) -> float | None:
    """Return how long a slot waits before it is leased again; None: it does not wait."""
    if slot.state is not SlotState.AVAILABLE or slot.last_failure not in FAULTS:
        return None
    return FIRST_RETRY_S * (1 << (_faults(slot) - 1))


def reopened(slot: Slot) -> Slot:
    """Return a slot whose attempt failed as it goes on: available, or abandoned after too many."""
    has_final_fault = any(attempt.failure in FINAL_FAULTS for attempt in slot.attempts)
    is_spent = has_final_fault or _faults(slot) >= MAX_FAULTS or len(slot.attempts) >= MAX_ATTEMPTS
    return replace(slot, state=SlotState.ABANDONED if is_spent else SlotState.AVAILABLE, winner=0)


def _faults(slot: Slot) -> int:
    return sum(attempt.failure in FAULTS for attempt in slot.attempts)
