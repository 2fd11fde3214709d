"""The task ``noise_mask``: an image and its label for each row; the engine's classifier gives the reward."""

from typing import Any

from node.grading.completion import CompletionText, Row
from node.noise_masks import as_text
from node.questions.noise_mask_row import NoiseMaskOptions, noise_mask_row


class NoiseMaskTask:
    """Rewards are those of the engine: no grader has the model, so that none can be worked out again."""

    prompts = None

    def __init__(self, **options: Any) -> None:
        self._options = NoiseMaskOptions.model_validate(options)

    def prompt(self, index: int, row: Row | None) -> str:
        return as_text(*noise_mask_row(row or {}, self._options))

    def grade(self, index: int, row: Row | None, completion: CompletionText) -> float:
        if completion.measured is None:
            raise ValueError("the engine measured nothing: the model is not a policy of the kind noise_mask")
        return completion.measured
