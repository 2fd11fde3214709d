"""A game of several turns, and tasks that reply badly."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from sampler.tasks.task import CompletionText


class Guessing:
    """A number from 0 to 9 is to be found; each wrong guess is answered by where to look."""

    prompts = 10
    max_turns = 4

    def prompt(self, index: int, row: Any) -> Any:
        return "guess="

    def reply(self, index: int, row: Any, conversation: Sequence[Mapping[str, str]]) -> str | None:
        guess = guessed(conversation[-1]["content"])
        if guess is None:
            return " a number"
        if guess == index:
            return None
        return " higher" if guess < index else " lower"

    def grade(self, index: int, row: Any, completion: Any) -> tuple[float, dict[str, float]]:
        guesses = [m for m in completion.conversation if m["role"] == "assistant"]
        assert completion.text == guesses[-1]["content"]
        is_found = guessed(completion.text) == index
        return float(is_found), {"turns": len(guesses), "drawn": completion.tokens}


def guessed(text: str) -> int | None:
    """Return the last digit that somebody wrote; None if there is none."""
    return next((int(character) for character in reversed(text) if character.isdigit()), None)


class ReplyRaises(Guessing):
    """Raises in reply to two prompts of ten."""

    def reply(self, index: int, row: Any, conversation: Sequence[Mapping[str, str]]) -> str | None:
        if index in (3, 7):
            raise RuntimeError("no words")
        return super().reply(index, row, conversation)


class ReplyHangs(Guessing):
    """Hangs in reply to two prompts of ten."""

    def reply(self, index: int, row: Any, conversation: Sequence[Mapping[str, str]]) -> str | None:
        if index in (3, 7):
            time.sleep(3600)
        return super().reply(index, row, conversation)


class RepliesNothing(Guessing):
    """Replies to two prompts of ten with a text without a token."""

    def reply(self, index: int, row: Any, conversation: Sequence[Mapping[str, str]]) -> str | None:
        return "" if index in (3, 7) else super().reply(index, row, conversation)


class Short:
    """A task without rows that repeats what it is told, once."""

    prompts = 3
    is_stateful = True
    max_turns = 7

    def prompt(self, index: int, row: object) -> str:
        return f"{index}="

    def reply(
        self, index: int, row: object, conversation: Sequence[Mapping[str, str]]
    ) -> list[dict[str, str]] | None:
        if len(conversation) > 1:
            return None
        return [{"role": "tool", "content": f"{index}: {conversation[0]['content']}"}]

    def grade(self, index: int, row: object, completion: CompletionText) -> float:
        return float(len(completion.text))


class Endless(Guessing):
    """Has no bound that a task may have."""

    max_turns = 10**6
