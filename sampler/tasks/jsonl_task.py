"""Prompts and answers that are columns of the run's data; no file is needed where this runs."""

import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

from node.task_options import JsonlOptions
from sampler.tasks.answer_graders import BUILT_IN
from sampler.tasks.question import answer_of, asked
from sampler.tasks.task import CompletionText, Graded, Message, Row


class JsonlTask:
    """One prompt for each row; options as in ``JsonlOptions``."""

    prompts = None

    def __init__(self, **options: Any) -> None:
        self._options = JsonlOptions.model_validate(options)
        self.max_prompt_tokens = self._options.max_prompt_tokens
        self._grader: Callable[[Row, CompletionText], Graded] | None = None
        if (name := self._options.grader) not in BUILT_IN:
            self._grader = pkgutil.resolve_name(name)

    def prompt(self, index: int, row: Row | None) -> str | Sequence[Message]:
        column = self._options.messages or self._options.prompt
        question = _column(row, column)
        if self._options.messages is None and not isinstance(question, str):
            raise TypeError(f"column {column!r} of row {index} is {type(question).__name__}, not a text")
        return asked(question, self._options)

    def grade(self, index: int, row: Row | None, completion: CompletionText) -> Graded:
        if self._grader is not None:
            return self._grader(row or {}, completion)
        right = str(_column(row, self._options.answer))
        answer = answer_of(completion, self._options)
        return 0.0 if answer is None else BUILT_IN[self._options.grader](answer, right)


def _column(row: Row | None, name: str) -> Any:
    if row is None or name not in row:
        raise KeyError(f"the row has no column {name!r}, it has {', '.join(row or ())}")
    return row[name]
