"""Why a row cannot be used: the column, its value, and the rule that it breaks."""


class RowError(ValueError):
    """A row that cannot be a prompt, or that has no right answer for the run's grader.

    Attributes:
        column: the column at fault, as the task's options name it.
        rule: the fault, such as ``is null, not a text``. Rows with the same fault have the same words, so
            that faults can be counted by kind.
    """

    def __init__(self, column: str, rule: str, *, value: object = None) -> None:
        super().__init__(f"column {column!r} {rule}" + ("" if value is None else f": {value!r:.100}"))
        self.column = column
        self.rule = rule
