"""The demo's task with a grader that some completions make slow, as a parser of formulas may be."""

import time
from typing import Final

from sampler.tasks.addition import AdditionTask
from sampler.tasks.task import CompletionText

SLOW: Final = "++"
"""In a completion. No honest sampler draws it: the base model was taught sums."""

SLOW_S: Final = 3.4
"""Eight such completions of one group stay below the 30 s after which a grader is killed."""


USUAL_S: Final = 0.02
"""For any other completion. It sets the pace of a sampler with one grader process, 6 groups of eight a
second, so that a run's speed does not depend on how busy the machine is."""


class StallingTask(AdditionTask):
    """Sums of two digits, of which a grader thinks for long where it is asked about ``SLOW``."""

    def grade(self, index: int, row: object, completion: CompletionText) -> float:
        time.sleep(SLOW_S if SLOW in completion.text else USUAL_S)
        return super().grade(index, row, completion)
