"""Built-in tasks that ask a question and grade the answer, of the run's data or of a generator."""

import itertools
import pkgutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from node.questions.messages import content_text
from node.questions.question import question_of, tools_of
from node.questions.right_answer import answer_texts
from node.questions.row_check import check_row
from node.task_options import (
    GRADERS,
    JsonlOptions,
    PromptOptions,
    ReasoningGymOptions,
    column_of,
)
from sampler.tasks import answer_graders, formula_check
from sampler.tasks.answer_part import answer_part
from sampler.tasks.judge_endpoint import JudgeEndpoint
from sampler.tasks.returned_rewards import grade_each
from sampler.tasks.task import CompletionText, Graded, GraderOutageError, Message, Outage, Row

TIMED_NOISE: Final = 0.02
"""Share of groups in which a grader with time limits may differ the second time, on a busier machine."""

_NOISE: Final = dict.fromkeys(("exact", "contains", "number"), 0.0) | dict.fromkeys(
    ("math_verify", "code"), TIMED_NOISE
)


class JsonlTask:
    """One prompt for each row; ``local``: this sampler's settings for the graders ``judge`` and ``code``, or
    ``grades``: False where it makes prompts alone."""

    prompts = None
    sees_tokens = False

    def __init__(self, *, local: Mapping[str, Any] | None = None, **options: Any) -> None:
        self._options = given = JsonlOptions.model_validate(options)
        self.max_prompt_tokens = given.max_prompt_tokens
        self.noise_ratio: float | None = _NOISE.get(given.grader)
        self.outages: Counter[Outage] = Counter()
        self._grade_group: Callable[[Row, Sequence[CompletionText]], list[Graded]]
        if local is not None and not local.get("grades", True):
            self._grade_group = _graded_elsewhere
        elif given.judge is not None:
            from sampler.tasks.judge import Judge  # an extra: imported only where it is used

            assert local is not None, "task_setup has looked for the judge"
            endpoint = JudgeEndpoint.model_validate(local["judge"])
            self._judge = Judge(
                given.judge, endpoint, group_limit_s=local["group_limit_s"], outages=self.outages
            )
            self._grade_group = self._judged
        elif given.code is not None:
            from sampler.tasks.code.code_grader import CodeGrader
            from sampler.tasks.code.sandbox import find_sandbox

            assert local is not None, "task_setup has looked for the sandbox"
            sandbox = find_sandbox()
            if not local["is_sandbox_tried"]:
                sandbox.check()
            self._code_grader = CodeGrader(given.code, sandbox, at_once=local["at_once"])
            self._grade_group = self._tested
        elif given.grader in GRADERS:
            if given.grader == "math_verify":
                formula_check.warm()  # before there is a group that it would be counted against
            self._grade_group = self._compared
        else:
            grader: Callable[[Row, CompletionText], Graded] = pkgutil.resolve_name(given.grader)
            self.noise_ratio = getattr(grader, "noise_ratio", None)
            self.sees_tokens = bool(getattr(grader, "sees_tokens", False))
            self.grader_name = given.grader
            self._grade_group = lambda row, completions: grade_each(partial(grader, row), completions)

    def prompt(self, index: int, row: Row | None) -> str | Sequence[Message]:
        check_row(row or {}, self._options)
        return asked(question_of(row or {}, self._options), self._options)

    def template_arguments_of(self, index: int, row: Row | None) -> Mapping[str, Any]:
        tools = tools_of(row or {}, self._options)
        return {"tools": tools} if tools else {}

    def grade(self, index: int, row: Row | None, completion: CompletionText) -> Graded:
        return self.grade_group(index, row, [completion])[0]

    def grade_group(self, index: int, row: Row | None, completions: Sequence[CompletionText]) -> list[Graded]:
        return self._grade_group(row or {}, completions)

    def _compared(self, row: Row, completions: Sequence[CompletionText]) -> list[Graded]:
        answers = [answer_of(completion, self._options) for completion in completions]
        return answer_graders.BY_NAME[self._options.grader](answers, answer_texts(row, self._options))

    def _judged(self, row: Row, completions: Sequence[CompletionText]) -> list[Graded]:
        assert self._options.judge is not None
        question = question_of(row, self._options)
        if not isinstance(question, str):
            question = "\n\n".join(map(content_text, question))
        right = " or ".join(answer_texts(row, self._options))
        answers = [answer_of(completion, self._options) for completion in completions]
        # Completions without an answer get 0 and are not sent to the judge.
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
            answer_part(completion.text, completion.finish, self._options).text or ""
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


class ReasoningGymTask:
    """The questions of one generator, the same in every process; options as in ``ReasoningGymOptions``."""

    def __init__(self, **options: Any) -> None:
        from reasoning_gym import create_dataset  # an extra: imported only where it is used

        self._options = given = ReasoningGymOptions.model_validate(options)
        self.max_prompt_tokens = given.max_prompt_tokens
        self.prompts = given.size
        self.noise_ratio = TIMED_NOISE  # some of its generators score with time limits
        self._dataset = create_dataset(given.dataset, size=given.size, seed=given.seed, **given.arguments)

    def prompt(self, index: int, row: Row | None) -> str | Sequence[Message]:
        return asked(self._dataset[index]["question"], self._options)

    def grade(self, index: int, row: Row | None, completion: CompletionText) -> float:
        answer = answer_of(completion, self._options)
        return float(self._dataset.score_answer(answer=answer, entry=self._dataset[index]))


def _graded_elsewhere(row: Row, completions: Sequence[CompletionText]) -> list[Graded]:
    raise RuntimeError("verifiers grade this run")


def asked(question: str | Sequence[Message], options: PromptOptions) -> str | Sequence[Message]:
    """Return a question with the system prompt: messages where the chat template is used, else a text.

    The system prompt of the options comes before one of the row, in the same message.
    """
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
    if options.system:
        messages = [{"role": "system", "content": options.system}, *messages]
    messages = _with_one_system_message(messages)
    return messages if options.chat else "\n\n".join(map(content_text, messages))


def _with_one_system_message(messages: Sequence[Message]) -> list[Message]:
    """Join the system messages that messages begin with: most templates take one, in the first place."""
    leading = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    if len(leading) < 2:
        return list(messages)
    content = "\n\n".join(map(content_text, leading))
    return [{**leading[0], "content": content}, *messages[len(leading) :]]


def answer_of(completion: CompletionText, options: PromptOptions) -> str | None:
    """Return what of a completion is graded, stripped; None: it has no answer."""
    return answer_part(completion.text, completion.finish, options).stripped
