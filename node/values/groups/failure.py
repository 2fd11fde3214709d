"""Why an attempt at a prompt failed, as values that sampler, wire and coordinator share.

A lease returned without a failure was not begun, or its sampler was stopped: no attempt is counted. A lease
returned with a failure counts as an attempt at the prompt.
"""

import enum
from dataclasses import dataclass
from typing import ClassVar, Final

from node.values.fact import Fact

DETAIL_CHARACTERS: Final = 200
"""Longest detail of a failure: it comes from the task's own code and is shown to operators."""


class Failure(enum.StrEnum):
    """Why an attempt failed. Closed: also the ``reason`` label of metrics."""

    PROMPT_TOO_LONG = "prompt_too_long"
    """Prompt and completion do not fit the sampler's context, which may be shorter than another's."""
    PROMPT_FAILED = "prompt_failed"
    """The task's ``prompt`` raised, returned no text, or ended its process."""
    PROMPT_TIMED_OUT = "prompt_timed_out"
    GRADING_FAILED = "grading_failed"
    """The task's ``grade`` raised, returned no finite number, or ended its process."""
    GRADING_TIMED_OUT = "grading_timed_out"
    ENGINE_REFUSED = "engine_refused"
    """The engine refuses to sample it, for another reason than its length."""
    EXPIRED = "expired"
    """The lease ran out without a renewal, a group or a failure."""
    REFUSED = "refused"
    """A group arrived, and the coordinator or the learner refused it."""


FAULTS: Final = frozenset(Failure) - {Failure.EXPIRED, Failure.REFUSED}
"""The failures a sampler may report; the coordinator finds the others itself."""


@dataclass(frozen=True, slots=True)
class FailedLease:
    """A lease returned because the prompt could not be answered."""

    lease_id: str
    fault: Failure
    detail: str = ""


def detail_of(text: str) -> str:
    """Return ``text`` as one bounded line of printable characters."""
    words = " ".join(text[: 4 * DETAIL_CHARACTERS].split())
    return "".join(filter(str.isprintable, words))[:DETAIL_CHARACTERS]


@dataclass(frozen=True, slots=True)
class BadPrompt(Fact):
    """A prompt that could not be answered."""

    kind: ClassVar[str] = "bad_prompt"

    prompt_index: int
    reason: Failure
    """Why it failed last."""
    detail: str
    times: int
    """How often in a row two samplers failed it, this time included; a success resets the count."""
    slot: int
    """The newest slot that failed."""
    at_s: float
    """When it was withheld or set aside last, Unix seconds on the coordinator's clock."""
    said_by: tuple[str, ...] = ()
    """Samplers that failed it since; from one alone it is withheld, with two nobody gets it."""
    retry_at_s: float = 0.0
    """When it is leased to them again, same clock; worked out anew at a start, from the configuration."""

    @property
    def key(self) -> str:
        return str(self.prompt_index)
