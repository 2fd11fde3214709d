"""Sums of two digits: the smallest task that can be got wrong."""

from typing import Final

_DIGITS: Final = 10


class AdditionTask:
    """``a+b=`` for all pairs of digits; 1 for the exact sum, 0 for anything else."""

    prompts: int = _DIGITS * _DIGITS

    def prompt(self, index: int) -> str:
        a, b = divmod(index, _DIGITS)
        return f"{a}+{b}="

    def answer(self, index: int) -> str:
        return str(sum(divmod(index, _DIGITS)))

    def grade(self, index: int, text: str) -> float:
        return float(text == self.answer(index))
