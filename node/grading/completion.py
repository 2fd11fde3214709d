"""Completions as graders get them, the rewards they return, and how they say that they cannot grade now."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]
"""``{"role": ..., "content": ...}`` and what else chat templates take, such as ``tool_calls``. A content is a
text, or a list of text parts."""

Row: TypeAlias = Mapping[str, Any]
"""A JSON object."""


@dataclass(frozen=True, slots=True)
class CompletionText:
    """A completion as a grader sees it."""

    text: str
    """Without its end token and the stop string that ended it; other special tokens as they are written, such
    as ``</think>``. Of several turns, the last."""
    tokens: int
    """All that were sampled."""
    finish: str
    """``end`` (the model's end token), ``stop`` (a stop string) or ``length`` (cut at the limit)."""
    conversation: Sequence[Message] = ()
    """All turns and the replies between them, as ``reply`` gets them; empty where the task has none."""
    measured: float | None = None
    """The reward, where the engine computes it from the model itself; None: it does not."""
    token_ids: Sequence[int] = ()
    """Token ids drawn in the turn of ``text``, with its end token; for graders with ``sees_tokens``."""
    prompt: str = ""
    """The prompt as the model read it, special tokens included; for graders with ``sees_tokens``."""


Graded: TypeAlias = float | tuple[float | None, Mapping[str, float | None]] | None
"""A reward from -1e6 to 1e6, or one with at most 16 other numbers by name, each up to 1e12.

None: the grader abstains. The completion has no reward and teaches nothing; its group's mean and deviation
are those of the others. A group with no reward at all counts as one that could not be graded.
"""


class Outage(enum.StrEnum):
    """Why a grader could not grade, whichever service or process it asks. Closed: the label of the metric."""

    UNREACHABLE = "unreachable"
    """No connection, or one that ended before the answer did."""
    TIMED_OUT = "timed_out"
    OVER_QUOTA = "over_quota"
    """HTTP 429."""
    FAILED = "failed"
    """HTTP 408 or 5xx."""
    REFUSED = "refused"
    """Any other HTTP status: a wrong key, address, model or request. Not repeated."""
    UNREADABLE = "unreadable"
    """An answer without a score on the scale."""
    NOT_STARTED = "not_started"
    """A process that it needs, such as a sandbox, ended before it began."""


class GraderOutageError(Exception):
    """A group cannot be graded now, and is given back: its prompt is not to blame.

    What the grader needs beyond its own process is away: a judge that answers, a sandbox that starts.
    ``outage``: of the last attempt.
    """

    def __init__(self, outage: Outage, what: str) -> None:
        super().__init__(what)
        self.outage = outage
