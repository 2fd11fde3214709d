"""Why an attempt at a prompt came to nothing, as values that sampler, wire and coordinator share.

A sampler that gives a lease back without a failure has not begun it, or was stopped: that costs no
attempt. A lease given back with a failure was a try at the prompt, and tries are counted.
"""

import enum
from dataclasses import dataclass
from typing import Final

DETAIL_CHARACTERS: Final = 200
"""Of what a sampler says of a failure: it comes from the task's own code and is shown to operators."""


class Failure(enum.StrEnum):
    """Closed: also the ``reason`` label of metrics."""

    PROMPT_TOO_LONG = "prompt_too_long"
    """Prompt and completion do not fit the model's context; the same for every sampler."""
    PROMPT_FAILED = "prompt_failed"
    """The task's ``prompt`` raised, returned something else than a text, or ended its process."""
    PROMPT_TIMED_OUT = "prompt_timed_out"
    GRADING_FAILED = "grading_failed"
    """The task's ``grade`` raised, returned something else than a finite number, or ended its process."""
    GRADING_TIMED_OUT = "grading_timed_out"
    ENGINE_REFUSED = "engine_refused"
    """The engine will not sample it, for another reason than its length."""
    EXPIRED = "expired"
    """Nothing was heard of the lease for its whole term."""
    REFUSED = "refused"
    """A group came, and the coordinator or the learner refused it."""


FAULTS: Final = frozenset(Failure) - {Failure.EXPIRED, Failure.REFUSED}
"""What a sampler may say of a prompt; the others are the coordinator's own findings."""


@dataclass(frozen=True, slots=True)
class FailedLease:
    """A lease given back because the prompt could not be answered."""

    lease_id: str
    fault: Failure
    detail: str = ""


def detail_of(text: str) -> str:
    """Return ``text`` as it may be stored and shown: one line of printable characters, bounded."""
    words = " ".join(text[: 4 * DETAIL_CHARACTERS].split())
    return "".join(filter(str.isprintable, words))[:DETAIL_CHARACTERS]


@dataclass(frozen=True, slots=True)
class BadPrompt:
    """A prompt that was abandoned, for now."""

    prompt_index: int
    reason: Failure
    """Of its newest abandonment."""
    detail: str
    times: int
    """How often in a row it was abandoned; a success in between forgets them."""
    slot: int
    """The newest slot that was abandoned with it."""
    at_s: float
    """Unix seconds on the coordinator's clock of the newest abandonment."""
    retry_at_s: float = 0.0
    """When it is leased again, likewise; not stored, so that it follows the configuration."""
