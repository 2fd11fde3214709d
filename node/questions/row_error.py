"""Why a row cannot be used: the column, its value, and the rule that it breaks."""

from collections.abc import Mapping
from typing import Any

from node.task_options import column_of


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
