"""The task ``reasoning_gym``: questions that a generator of that package makes and scores."""

from collections.abc import Sequence
from typing import Any

from pydantic import Field, JsonValue

from node.grading.completion import CompletionText, Message, Row
from node.grading.grader import TIMED_NOISE
from node.questions.answer_part import answer_part
from node.tasks.task_options import AnswerSource, PromptOptions
from sampler.tasks.asked_questions import asked


class ReasoningGymOptions(PromptOptions):
    """Options of ``reasoning_gym``: questions that a generator of that package makes and scores."""

    dataset: str = Field(pattern=r"^[a-z0-9_]+$")
    """Name of the generator, such as ``leg_counting``."""
    size: int = Field(default=1000, ge=1, le=1 << 31)
    """Number of questions."""
    seed: int = Field(default=0, ge=0, lt=1 << 31)
    """Seed of the questions; the same everywhere."""
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """The generator's own arguments."""
    answer_from: AnswerSource = "tags"
    """As for every task that asks a question."""

    @property
    def package(self) -> str | None:
        return "reasoning_gym"

    @property
    def prompts(self) -> int:
        return self.size


class ReasoningGymTask:
    """The questions of one generator, the same in every process; options as in ``ReasoningGymOptions``."""

    noise_ratio = TIMED_NOISE  # some of its generators score with time limits

    def __init__(self, **options: Any) -> None:
        from reasoning_gym import create_dataset  # an extra: imported only where it is used

        self._options = given = ReasoningGymOptions.model_validate(options)
        self.max_prompt_tokens = given.max_prompt_tokens
        self.prompts = given.size
        self._dataset = create_dataset(given.dataset, size=given.size, seed=given.seed, **given.arguments)

    def prompt(self, index: int, row: Row | None) -> str | Sequence[Message]:
        return asked(self._dataset[index]["question"], self._options)

    def grade(self, index: int, row: Row | None, completion: CompletionText) -> float:
        answer = answer_part(completion.text, completion.finish, self._options).stripped
        return float(self._dataset.score_answer(answer=answer, entry=self._dataset[index]))
