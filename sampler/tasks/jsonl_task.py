"""Prompts and answers that are columns of the run's data; no file is needed where this runs."""

import pkgutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from node.task_options import JsonlOptions, column_of
from sampler.tasks.answer_graders import BUILT_IN
from sampler.tasks.code.code_grader import CodeGrader
from sampler.tasks.code.sandbox import find_sandbox
from sampler.tasks.grader_outage import GraderOutageError, Outage
from sampler.tasks.judge_endpoint import JudgeEndpoint
from sampler.tasks.question import answer_of, asked
from sampler.tasks.task import CompletionText, Graded, Message, Row


class JsonlTask:
    """One prompt for each row; options as in ``JsonlOptions``.

    Args:
        local: What the graders ``judge`` and ``code`` take from this sampler's configuration.
    """

    prompts = None

    def __init__(self, *, local: Mapping[str, Any] | None = None, **options: Any) -> None:
        self._options = given = JsonlOptions.model_validate(options)
        self.max_prompt_tokens = given.max_prompt_tokens
        self.outages: Counter[Outage] = Counter()
        self._grade_group: Callable[[Row, Sequence[CompletionText]], list[Graded]]
        if given.judge is not None:
            from sampler.tasks.judge import Judge  # an extra: imported only where it is used

            assert local is not None, "task_setup has looked for the judge"
            endpoint = JudgeEndpoint.model_validate(local["judge"])
            self._judge = Judge(
                given.judge, endpoint, group_limit_s=local["group_limit_s"], outages=self.outages
            )
            self._grade_group = self._judged
        elif given.code is not None:
            assert local is not None, "task_setup has tried the sandbox"
            self._code_grader = CodeGrader(given.code, find_sandbox(), at_once=local["at_once"])
            self._grade_group = self._tested
        elif given.grader in BUILT_IN:
            self._grade_group = self._compared
        else:
            grader: Callable[[Row, CompletionText], Graded] = pkgutil.resolve_name(given.grader)
            self._grade_group = lambda row, completions: [grader(row, each) for each in completions]

    def prompt(self, index: int, row: Row | None) -> str | Sequence[Message]:
        return asked(self._question(row or {}), self._options)

    def grade(self, index: int, row: Row | None, completion: CompletionText) -> Graded:
        return self.grade_group(index, row, [completion])[0]

    def grade_group(self, index: int, row: Row | None, completions: Sequence[CompletionText]) -> list[Graded]:
        return self._grade_group(row or {}, completions)

    def _question(self, row: Row) -> str | list[Message]:
        """Return the prompt's text, or its messages without what is null in them."""
        name = self._options.messages or self._options.prompt
        question = column_of(row, name)
        if isinstance(question, str):
            return question
        if self._options.messages is None:
            raise TypeError(f"column {name!r} is {type(question).__name__}, not a text")
        if not isinstance(question, list) or not all(isinstance(message, Mapping) for message in question):
            raise TypeError(f"column {name!r} is {question!r:.100}, not a list of messages")
        return [{key: text for key, text in each.items() if text is not None} for each in question]

    def _right(self, row: Row) -> str:
        """Return the right answer.

        Raises:
            ValueError: it is empty, which any completion would contain.
            TypeError: it is neither a text nor a number.
        """
        name = self._options.answer
        right = column_of(row, name)
        if not isinstance(right, str | int | float):
            raise TypeError(f"column {name!r} is {right!r:.100}, not a text or a number")
        if not (text := str(right).strip()):
            raise ValueError(f"column {name!r} is empty")
        return text

    def _compared(self, row: Row, completions: Sequence[CompletionText]) -> list[Graded]:
        right = self._right(row)
        compare = BUILT_IN[self._options.grader]
        answers = [answer_of(completion, self._options) for completion in completions]
        return [0.0 if answer is None else compare(answer, right) for answer in answers]

    def _judged(self, row: Row, completions: Sequence[CompletionText]) -> list[Graded]:
        assert self._options.judge is not None
        question = self._question(row)
        if not isinstance(question, str):
            question = "\n\n".join(message["content"] for message in question)
        right = self._right(row) if "{answer}" in self._options.judge.template else ""
        answers = [answer_of(completion, self._options) for completion in completions]
        # What has no answer is worth nothing, and costs nothing.
        judged = iter(self._judge.rewards(question, right, [text for text in answers if text is not None]))
        grades: list[Graded] = []
        for answer in answers:
            reward, score = (0.0, self._options.judge.lowest) if answer is None else next(judged)
            grades.append((reward, {"judge_score": score}))
        return grades

    def _tested(self, row: Row, completions: Sequence[CompletionText]) -> list[Graded]:
        assert self._options.code is not None
        # What continues a prefix keeps its indentation.
        texts = [
            completion.text
            if self._options.answer_from == "text"
            else answer_of(completion, self._options) or ""
            for completion in completions
        ]
        grades: list[Graded] = []
        try:
            verdicts = self._code_grader.verdicts(row, column_of(row, self._options.answer), texts)
        except GraderOutageError as error:
            self.outages[error.outage] += 1
            raise
        for verdict in verdicts:
            share = verdict.passed / verdict.tests
            reward = share if self._options.code.reward == "share" else float(share == 1.0)
            metrics = {"passed": share, "timed_out": verdict.timed_out, "crashed": verdict.crashed}
            grades.append((reward, metrics))
        return grades
