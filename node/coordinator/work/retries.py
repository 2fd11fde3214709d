"""When a slot whose attempt failed is leased again, and when it is given up; pure.

A lease that is given back unbegun leaves no trace. Every other attempt that came to nothing counts. After a
fault, which a sampler found, the slot waits a moment and goes to another sampler (see ``bad_prompts``); where
there is none, it is given up, and its prompt is asked again in the next epoch.
"""

from dataclasses import replace
from typing import Final

from node.coordinator.work.slots import Slot, SlotState
from node.failure import FAULTS

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


def retry_after_s(slot: Slot) -> float | None:
    """Return how long a slot waits before it is leased again; None: it does not wait."""
    if slot.state is not SlotState.AVAILABLE or slot.last_failure not in FAULTS:
        return None
    return FIRST_RETRY_S


def reopened(slot: Slot) -> Slot:
    """Return a slot whose attempt failed as it goes on: available, or abandoned after too many."""
    witnesses = [attempt.holder for attempt in slot.attempts if attempt.failure in FAULTS]
    has_failed = len(set(witnesses)) >= MAX_WITNESSES or len(witnesses) >= MAX_FAULTS
    is_spent = has_failed or len(slot.attempts) >= MAX_ATTEMPTS
    return replace(slot, state=SlotState.ABANDONED if is_spent else SlotState.AVAILABLE, winner=0)


def given_up(slot: Slot) -> Slot:
    """Return a slot that nobody has taken for too long."""
    return replace(slot, state=SlotState.ABANDONED if slot.attempts else SlotState.SKIPPED)
