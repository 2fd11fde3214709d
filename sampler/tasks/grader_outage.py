"""Outages of things that a grader needs beyond its own process: a judge that answers, a sandbox that starts.

The group is given back, and its prompt is not to blame.
"""

import enum


class Outage(enum.StrEnum):
    """Why a grader could not grade. Closed: the ``reason`` label of the metric."""

    JUDGE_UNREACHABLE = "judge_unreachable"
    """No connection, or one that ended before the answer did."""
    JUDGE_TIMED_OUT = "judge_timed_out"
    JUDGE_OVER_QUOTA = "judge_over_quota"
    """HTTP 429."""
    JUDGE_FAILED = "judge_failed"
    """HTTP 408 or 5xx."""
    JUDGE_REFUSED = "judge_refused"
    """Any other HTTP status: a wrong key, address, model or request. Not repeated."""
    JUDGE_UNREADABLE = "judge_unreadable"
    """An answer without a score on the scale."""
    SANDBOX_FAILED = "sandbox_failed"
    """The sandbox ended before the program in it began."""


class GraderOutageError(Exception):
    """A group cannot be graded now, through no fault of its prompt; ``outage``: of the last attempt."""

    def __init__(self, outage: Outage, what: str) -> None:
        super().__init__(what)
        self.outage = outage
