"""A grader of one's own: a function ``(row, completion) -> reward``, which each peer must allow."""

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from node.grading.completion import CompletionText, Graded, Row
from node.grading.grader import AnswerGrader
from sampler.tasks.returned_rewards import grade_each


class FunctionGrader(AnswerGrader):
    """Calls the function that its name is the import path of; rows are that function's own business."""

    _function: Callable[[Row, CompletionText], Graded]

    @property
    def reads_answer(self) -> bool:
        return False

    @property
    def shows_answer(self) -> bool:
        return False

    def start(self, local: Mapping[str, Any]) -> None:
        self._function = pkgutil.resolve_name(self.name)
        self.noise_ratio = getattr(self._function, "noise_ratio", None)
        self.sees_tokens = bool(getattr(self._function, "sees_tokens", False))

    def grade_group(self, row: Row, completions: Sequence[CompletionText]) -> list[Graded]:
        return grade_each(partial(self._function, row), completions)
