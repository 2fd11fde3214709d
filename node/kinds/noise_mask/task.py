"""The task ``noise_mask``: an image and its label for each row; the engine's classifier gives the reward."""

from typing import Any, Final

from node.grading.completion import CompletionText, Row
from node.kinds.noise_mask.row import NoiseMaskOptions, noise_mask_row
from node.kinds.noise_mask.values import as_text


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


TASK: Final = NoiseMaskTask
OPTIONS: Final = NoiseMaskOptions
