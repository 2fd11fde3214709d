"""The task ``jsonl``: each row of the run's data asks a question, and a grader compares the answers."""

from collections.abc import Mapping, Sequence
from typing import Any

from node.grading.completion import CompletionText, Graded, Message, Row
from node.grading.jsonl_options import JsonlOptions
from node.questions.question import question_of, tools_of
from sampler.tasks.asked_questions import asked


class JsonlTask:
    """One prompt for each row; ``local``: what the grader needs of this sampler, or ``grades``: False where
    it makes prompts alone."""

    prompts = None

    def __init__(self, *, local: Mapping[str, Any] | None = None, **options: Any) -> None:
        self._options = given = JsonlOptions.model_validate(options)
        self._grader = given.made_grader
        self._grades: bool = (local or {}).get("grades", True)
        if self._grades:
            self._grader.start(local or {})
        self.max_prompt_tokens = given.max_prompt_tokens
        self.noise_ratio = self._grader.noise_ratio
        self.sees_tokens = self._grader.sees_tokens
        self.outages = self._grader.outages
        self.grader_name = self._grader.name

    def prompt(self, index: int, row: Row | None) -> str | Sequence[Message]:
        self._options.check_row(row or {})
        return asked(question_of(row or {}, self._options), self._options)

    def template_arguments_of(self, index: int, row: Row | None) -> Mapping[str, Any]:
        tools = tools_of(row or {}, self._options)
        return {"tools": tools} if tools else {}

    def grade(self, index: int, row: Row | None, completion: CompletionText) -> Graded:
        return self.grade_group(index, row, [completion])[0]

    def grade_group(self, index: int, row: Row | None, completions: Sequence[CompletionText]) -> list[Graded]:
        if not self._grades:
            raise RuntimeError("verifiers grade this run")
        return self._grader.grade_group(row or {}, completions)
