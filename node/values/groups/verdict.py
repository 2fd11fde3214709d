"""The outcome of a group."""

import enum
from dataclasses import dataclass


class Verdict(enum.StrEnum):
    """The outcome of a group. Closed: also the ``verdict`` label of counters."""

    SPOOLED = "spooled"
    ACCEPTED = "accepted"
    STALE = "stale"
    DUPLICATE = "duplicate"
    FOREIGN = "foreign"
    MALFORMED = "malformed"
    SUSPECT = "suspect"
    TRAINED = "trained"
    UNINFORMATIVE = "uninformative"
    """Consumed in a batch that taught nothing; no step was taken."""


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    """The learner's or the coordinator's decision about one group."""

    group_id: str
    verdict: Verdict
    detail: str = ""
    """One line for people: which rule was broken, with the values."""
