"""A small task for tests and demos: sums of two digits."""

from typing import Final

_DIGITS: Final = 10


class AdditionTask:
    """Prompts ``a+b=`` for all pairs of digits; reward 1 for the exact sum, else 0."""

    prompts: int = _DIGITS * _DIGITS

    def prompt(self, index: int) -> str:
        a, b = divmod(index, _DIGITS)
        return f"{a}+{b}="

    def answer(self, index: int) -> str:
        return str(sum(divmod(index, _DIGITS)))

    def grade(self, index: int, text: str) -> float:
        return float(text == self.answer(index))
