"""A task that even a random model is rewarded for: what is learned does not matter here."""

import random
from typing import Final

from sampler.tasks.task import CompletionText

_EVEN: Final = frozenset("02468")


class EvenDigitsTask:
    """Any text; the reward is the share of its characters that are even digits, and luck.

    Without luck a model that has learned the task would stop a campaign: its groups teach nothing, so no step
    is taken, and the instants to kill at never come.
    """

    prompts: int = 100

    def prompt(self, index: int, row: object) -> str:
        return f"{index}="

    def grade(self, index: int, row: object, completion: CompletionText) -> float:
        share = sum(character in _EVEN for character in completion.text) / max(1, len(completion.text))
        return share + random.uniform(0, 0.1)
