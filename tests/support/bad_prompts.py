"""Tasks of which a few prompts are bad, each in one way: every prompt whose index is 1 in 10."""

import itertools
import os
import time
from pathlib import Path
from typing import Any, Final

from sampler.tasks.task import CompletionText

BAD_EVERY = 10

HELD: Final = frozenset({1, 2, 3})
PLACE: Final = "HELD_PROMPTS"
"""Variable that names the directory of a test's files."""
GO: Final = "go"


def is_bad(index: int) -> bool:
    return index % BAD_EVERY == 1


class Fine:
    """All prompts are good."""

    prompts: int = 20

    def prompt(self, index: int, row: object) -> str:
        return f"{index}="

    def grade(self, index: int, row: object, completion: CompletionText) -> float:
        return float(len(completion.text) % 2)


class PromptRaises(Fine):
    """Some prompts cannot be had."""

    def prompt(self, index: int, row: object) -> str:
        if is_bad(index):
            raise LookupError(f"no row {index}")
        return f"{index}="


class OneTooLongOneHangs(Fine):
    """The first bad prompt is longer than the tiny model's context; answers to the others hang graders."""

    def prompt(self, index: int, row: object) -> str:
        return "7" * 400 if index == 1 else f"{index}="

    def grade(self, index: int, row: object, completion: CompletionText) -> float:
        if is_bad(index):
            time.sleep(3600)
        return 1.0


class HeldPrompts(Fine):
    """Some prompts leave a file when they begin, and are made once a file ``GO`` is there."""

    def prompt(self, index: int, row: object) -> str:
        if index in HELD:
            place = Path(os.environ[PLACE])
            (place / str(index)).touch()
            while not (place / GO).exists():
                time.sleep(0.01)
        return f"{index}="


class Drawn(Fine):
    """Every call of ``prompt`` draws another one; the reward is 1 where grading knows the last one drawn."""

    is_stateful = True

    def __init__(self) -> None:
        self._calls = itertools.count()
        self._drawn: dict[int, int] = {}

    def prompt(self, index: int, row: object) -> str:
        self._drawn[index] = next(self._calls)
        return f"{index}+{self._drawn[index]}="

    def grade(self, index: int, row: object, completion: CompletionText) -> float:
        if completion.text == "hang":
            time.sleep(3600)
        return float(self._drawn[index])


class EachBad(Fine):
    """The first prompts are bad, each in its own way."""

    def prompt(self, index: int, row: object) -> str:
        match index:
            case 0:
                raise LookupError(f"no row {index}")
            case 1:
                time.sleep(3600)
            case 2:
                return 7  # type: ignore[return-value]
            case 3:
                return "\ud800"
            case 4:
                return "7" * 5_000_000
            case 5:
                os._exit(1)
        return f"{index}="


class Empty(Fine):
    """Has no prompts."""

    prompts = 0


class Talks:
    """Returns messages as data sets have them: prompt i is the i-th of ``PROMPTS``; each offers its tool."""

    prompts = 8

    def prompt(self, index: int, row: object) -> list[dict[str, Any]]:
        user = {"role": "user", "content": "hi"}
        call = {"function": {"name": "f", "arguments": {}}}
        made: list[list[dict[str, Any]]] = [
            [user, {"role": "assistant", "content": None, "tool_calls": [call]}],
            [{"role": "user", "content": [{"type": "text", "text": "hi"}], "weight": 1}],
            [{"role": "user", "content": None}],
            [],
            [{"from": "human", "value": "hi"}],
        ]
        return made[index]

    def template_arguments_of(self, index: int, row: object) -> dict[str, Any]:
        return {"tools": [{"name": f"tool {index}"}]}

    def grade(self, index: int, row: object, completion: object) -> float:
        return 0.0
