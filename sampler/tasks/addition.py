"""A small task for tests and demos: sums of two digits."""

from typing import Final

from node.grading.completion import CompletionText

_DIGITS: Final = 10


class AdditionTask:
    """Prompts ``a+b=`` for all pairs of digits; reward 1 for the exact sum, else 0."""

    prompts: int = _DIGITS * _DIGITS
    noise_ratio = 0.0

    def prompt(self, index: int, row: object) -> str:
        a, b = divmod(index, _DIGITS)
        return f"{a}+{b}="

    def answer(self, index: int) -> str:
        return str(sum(divmod(index, _DIGITS)))

    def grade(self, index: int, row: object, completion: CompletionText) -> float:
        return float(completion.text == self.answer(index))
