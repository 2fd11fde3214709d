"""The demo's task with a grader that some completions make slow, as a parser of formulas may be."""

import time
from typing import Final

from sampler.tasks.addition import AdditionTask
from sampler.tasks.task import CompletionText

SLOW: Final = "++"
"""In a completion. No honest sampler draws it: the base model was taught sums."""

SLOW_S: Final = 3.4
"""Eight such completions of one group stay below the 30 s after which a grader is killed."""


class StallingTask(AdditionTask):
    """Sums of two digits, of which a grader thinks for long where it is asked about ``SLOW``."""

    def grade(self, index: int, row: object, completion: CompletionText) -> float:
        if SLOW in completion.text:
            time.sleep(SLOW_S)
        return super().grade(index, row, completion)
