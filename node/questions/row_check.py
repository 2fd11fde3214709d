"""Whether a row of the data can be a prompt, and has what the run's grader needs; the same for every caller.

    --dry-run, a coordinator's start, try, samplers --> check_row(row, options) --> nothing, or RowError

A chat template that refuses messages, a prompt that is too long and tests that a sandbox refuses are found
later, where the model and the sandbox are. The rows of a custom task are its own business.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from node.questions.row_error import RowError
from node.task_options import TaskOptions

MOST_KINDS: Final = 20
"""Kinds of faults that are told apart; there are fewer, unless rules hold words of the rows."""


def check_row(row: Mapping[str, Any], options: TaskOptions | None) -> None:
    """Check one row for the task and the grader that ``options`` are of; None: a custom task.

    Raises:
        RowError: it can never be a prompt, or no completion could be graded.
    """
    if options is not None:
        options.check_row(row)


@dataclass(slots=True)
class FaultyRows:
    """Rows with one kind of fault."""

    rows: int
    first: str
    """Where the first of them is, such as ``row 17 of d.jsonl``."""
    example: str
    """The error of the first."""


@dataclass(slots=True)
class RowTally:
    """Rows that were checked, and those that cannot be used, by kind of fault."""

    checked: int = 0
    unusable: int = 0
    faults: dict[tuple[str, str], FaultyRows] = field(default_factory=dict)
    """By column and rule; the last of ``MOST_KINDS`` are all others."""

    def add(self, error: RowError, where: str) -> None:
        """Count a row that was refused."""
        self.unusable += 1
        kind = (error.column, error.rule)
        if kind not in self.faults and len(self.faults) >= MOST_KINDS:
            kind = ("", "others")
        if (fault := self.faults.get(kind)) is None:
            self.faults[kind] = FaultyRows(1, where, str(error))
        else:
            fault.rows += 1

    def summary(self) -> str:
        """Return how many rows cannot be used and why, most frequent first; empty: all can."""
        if not self.unusable:
            return ""
        kinds = sorted(self.faults.values(), key=lambda fault: -fault.rows)
        said = "; ".join(f"{fault.rows} as {fault.first}, whose {fault.example}" for fault in kinds)
        return f"{self.unusable} of {self.checked} rows cannot be used: {said}"
