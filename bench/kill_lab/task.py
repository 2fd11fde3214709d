"""A task that even a random model is rewarded for: what is learned does not matter here."""

from typing import Final

_EVEN: Final = frozenset("02468")


class EvenDigitsTask:
    """Any text; the reward is the share of its characters that are even digits."""

    prompts: int = 100

    def prompt(self, index: int) -> str:
        return f"{index}="

    def grade(self, index: int, text: str) -> float:
        return sum(character in _EVEN for character in text) / max(1, len(text))
