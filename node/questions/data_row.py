"""A row of the data: its columns, and why it cannot be a prompt or lacks what the run's grader needs.

    --dry-run, a start, try, samplers --> TaskOptions.check_row --> nothing, or RowError --> RowTally

A chat template that refuses messages, a prompt that is too long and tests that a sandbox refuses are found
later, where the model and the sandbox are.
"""

import json
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

MOST_KINDS: Final = 20
"""Kinds of faults that are told apart; there are fewer, unless rules hold words of the rows."""


def column_of(row: Mapping[str, Any], name: str) -> Any:
    """Return a column of a row, or what is inside one, such as reward_model.ground_truth or answers.text.0.

    A column whose own name has dots comes first. A text that holds JSON is looked into as if it were its
    value. Names may be composed of other code points than in the file: they are compared in NFC.

    Raises:
        KeyError: the row has no such column.
    """
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if isinstance(value, str):
            value = _json_in(value)
        try:
            value = value[int(part)] if isinstance(value, list) else _member(value, part)
        except (LookupError, TypeError, ValueError) as error:
            raise KeyError(f"the row has no column {name!r}, it has {', '.join(row)}") from error
    return value


def _member(value: Any, name: str) -> Any:
    if not isinstance(value, Mapping):
        raise TypeError(f"{type(value).__name__} has no members")
    if name in value:
        return value[name]
    wanted = unicodedata.normalize("NFC", name)
    return value[{unicodedata.normalize("NFC", key): key for key in value}[wanted]]


def _json_in(text: str) -> Any:
    """Return the object or list that a text holds as JSON; None: it holds none."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class RowError(ValueError):
    """A row that cannot be a prompt, or that has no right answer for the run's grader.

    Attributes:
        column: the column at fault, as the task's options name it.
        rule: the fault, such as ``is null, not a text``. Rows with the same fault have the same words, so
            that faults can be counted by kind.
    """

    def __init__(self, column: str, rule: str, *, value: object = None, detail: str = "") -> None:
        shown = detail or ("" if value is None else f"{value!r:.100}")
        super().__init__(f"column {column!r} {rule}" + (f": {shown}" if shown else ""))
        self.column = column
        self.rule = rule


def found_in(row: Mapping[str, Any], name: str) -> Any:
    """Return a column of a row; RowError where it has none."""
    try:
        return column_of(row, name)
    except KeyError:
        raise RowError(name, "is missing", detail=f"the row has {', '.join(row)[:500] or 'none'}") from None


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
