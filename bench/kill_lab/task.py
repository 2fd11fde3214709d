"""A task that even a random model is rewarded for: what is learned does not matter here."""

from typing import Final

from sampler.tasks.task import CompletionText

_EVEN: Final = frozenset("02468")


class EvenDigitsTask:
    """Any text; the reward is the share of its characters that are even digits."""

    prompts: int = 100

    def prompt(self, index: int, row: object) -> str:
        return f"{index}="

    def grade(self, index: int, row: object, completion: CompletionText) -> float:
        return sum(character in _EVEN for character in completion.text) / max(1, len(completion.text))
