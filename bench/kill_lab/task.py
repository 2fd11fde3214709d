"""Tasks that even a random model is rewarded for: what is learned does not matter here."""

import random
import string
import time
from typing import Final

from sampler.tasks.task import CompletionText

_EVEN: Final = frozenset("02468")


class EvenDigitsTask:
    """Any text; the reward is the share of its characters that are even digits, and luck.

    Without luck a model that has learned the task would stop a campaign: its groups teach nothing, so no step
    is taken, and the instants to kill at never come.
    """

    prompts: int = 100

    def __init__(self, pause_s: float = 0.0) -> None:
        """Take ``pause_s`` for each completion: a run that waits now and then leaves the cores to others."""
        self._pause_s = pause_s

    def prompt(self, index: int, row: object) -> str:
        return f"{index}="

    def grade(self, index: int, row: object, completion: CompletionText) -> float:
        time.sleep(self._pause_s)
        share = sum(character in _EVEN for character in completion.text) / max(1, len(completion.text))
        return share + random.uniform(0, 0.1)


class RankedDigitsTask(EvenDigitsTask):
    """All digits are candidates, and the run's completions rank some of them: the even ones are rewarded."""

    def prompt(self, index: int, row: object) -> str:
        from node.kinds.ranking.values import as_text

        return as_text(super().prompt(index, row), string.digits)
