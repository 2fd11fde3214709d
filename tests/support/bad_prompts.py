"""Tasks of which a few prompts are bad, each in one way: every prompt whose index is 1 in 10."""

import itertools
import time

BAD_EVERY = 10


def is_bad(index: int) -> bool:
    return index % BAD_EVERY == 1


class _Mostly:
    """Fine, but for some prompts."""

    prompts: int = 20

    def prompt(self, index: int) -> str:
        return f"{index}="

    def grade(self, index: int, text: str) -> float:
        return float(len(text) % 2)


class TooLong(_Mostly):
    """Some prompts are longer than the tiny model's context."""

    def prompt(self, index: int) -> str:
        return "7" * 400 if is_bad(index) else f"{index}="


class PromptRaises(_Mostly):
    """Some prompts cannot be had."""

    def prompt(self, index: int) -> str:
        if is_bad(index):
            raise LookupError(f"no row {index}")
        return f"{index}="


class PromptHangs(_Mostly):
    """Some prompts never come."""

    def prompt(self, index: int) -> str:
        if is_bad(index):
            time.sleep(3600)
        return f"{index}="


class GraderRaises(_Mostly):
    """Some completions cannot be graded."""

    def grade(self, index: int, text: str) -> float:
        if is_bad(index):
            raise RuntimeError("no such answer")
        return 1.0


class GraderHangs(_Mostly):
    """Some completions are graded for ever."""

    def grade(self, index: int, text: str) -> float:
        if is_bad(index):
            time.sleep(3600)
        return 1.0


class SlowPrompts(_Mostly):
    """Every prompt takes its time."""

    def prompt(self, index: int) -> str:
        time.sleep(0.5)
        return f"{index}="


class Drawn(_Mostly):
    """Every call of ``prompt`` draws another one; the reward is 1 where grading knows the last one drawn."""

    is_stateful = True

    def __init__(self) -> None:
        self._calls = itertools.count()
        self._drawn: dict[int, int] = {}

    def prompt(self, index: int) -> str:
        self._drawn[index] = next(self._calls)
        return f"{index}+{self._drawn[index]}="

    def grade(self, index: int, text: str) -> float:
        return float(self._drawn[index])
