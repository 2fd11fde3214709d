"""Questions that a generator of the package ``reasoning-gym`` makes and scores."""

from collections.abc import Sequence
from typing import Any

from node.task_options import ReasoningGymOptions
from sampler.tasks.question import answer_of, asked
from sampler.tasks.task import CompletionText, Message, Row


class ReasoningGymTask:
    """The questions of one generator, the same in every process; options as in ``ReasoningGymOptions``."""

    def __init__(self, **options: Any) -> None:
        from reasoning_gym import create_dataset  # an extra: imported only where it is used

        self._options = given = ReasoningGymOptions.model_validate(options)
        self.max_prompt_tokens = given.max_prompt_tokens
        self.prompts = given.size
        self._dataset = create_dataset(given.dataset, size=given.size, seed=given.seed, **given.arguments)

    def prompt(self, index: int, row: Row | None) -> str | Sequence[Message]:
        return asked(self._dataset[index]["question"], self._options)

    def grade(self, index: int, row: Row | None, completion: CompletionText) -> float:
        answer = answer_of(completion, self._options)
        return float(self._dataset.score_answer(answer=answer, entry=self._dataset[index]))
