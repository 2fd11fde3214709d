"""Tasks whose graders misbehave, one way each."""

import asyncio
import os
from typing import Any

from sampler.tasks.task import CompletionText


class _Unruly:
    prompts: int = 10

    def prompt(self, index: int, row: object) -> str:
        return f"{index}="


class Raising(_Unruly):
    """Raises on prompt 1."""

    def grade(self, index: int, row: object, completion: CompletionText) -> float:
        if index == 1:
            raise RuntimeError("no such answer")
        return 1.0


class Printing(_Unruly):
    """Prints to standard output while grading."""

    def grade(self, index: int, row: object, completion: CompletionText) -> float:
        print("graded", completion.text, flush=True)
        return 0.5


class Odd(_Unruly):
    """Returns what is not a reward, or numbers that no group may have, in a way for each prompt."""

    def grade(self, index: int, row: object, completion: CompletionText) -> Any:
        many = {f"m{number}": 1.0 for number in range(17)}
        odd = [float("nan"), 1e39, (1.0, {"words": float("inf")}), (1.0, {"Words!": 1.0}), (1.0, many), None]
        odd += ["right", {"score": 1.0}, (1.0, 2.0, 3.0)]
        return odd[index] if index < len(odd) else 1 / 0


class Abstaining(_Unruly):
    """Is a coroutine that rewards what it understands; each waits for the last of the group."""

    async def grade(self, index: int, row: object, completion: CompletionText) -> Any:
        await asyncio.sleep(0)
        reward = {"yes": 1.0, "no": 0.0, "perhaps": None}[completion.text]
        return reward, {"sure": None if reward is None else 1.0}


class Broken(_Unruly):
    """Cannot be made."""

    def __init__(self) -> None:
        raise ValueError("no data")


class Telling(_Unruly):
    """Says the values of variables that its argument names, as an environment's argument may ask it to."""

    def __init__(self, variables: list[str]) -> None:
        self._variables = variables

    def prompt(self, index: int, row: object) -> str:
        return os.environ.get(self._variables[index], "nothing")

    def grade(self, index: int, row: object, completion: CompletionText) -> float:
        return 1.0
