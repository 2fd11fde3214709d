"""Sums with a few bad prompts: one in twenty is bad, in the way that names the class."""

import time
from typing import Final

from sampler.tasks.task import CompletionText

BAD_EVERY: Final = 20


class GoodPrompts:
    """``a+b=``, as the task of the demo; four times as many prompts."""

    prompts: int = 400

    def prompt(self, index: int, row: object) -> str:
        a, b = divmod(index % 100, 10)
        return f"{a}+{b}="

    def grade(self, index: int, row: object, completion: CompletionText) -> float:
        return float(completion.text == str(sum(divmod(index % 100, 10))))


def is_bad(index: int) -> bool:
    """Whether the prompt is among those that cannot be answered."""
    return index % BAD_EVERY == 1


class TooLong(GoodPrompts):
    """Longer than the model's context."""

    def prompt(self, index: int, row: object) -> str:
        return "7" * 500 if is_bad(index) else super().prompt(index, row)


class PromptRaises(GoodPrompts):
    def prompt(self, index: int, row: object) -> str:
        if is_bad(index):
            raise LookupError(f"no row {index}")
        return super().prompt(index, row)


class PromptHangs(GoodPrompts):
    def prompt(self, index: int, row: object) -> str:
        if is_bad(index):
            time.sleep(3600)
        return super().prompt(index, row)


class GraderRaises(GoodPrompts):
    def grade(self, index: int, row: object, completion: CompletionText) -> float:
        if is_bad(index):
            raise RuntimeError("no such answer")
        return super().grade(index, row, completion)


class GraderHangs(GoodPrompts):
    def grade(self, index: int, row: object, completion: CompletionText) -> float:
        if is_bad(index):
            time.sleep(3600)
        return super().grade(index, row, completion)
