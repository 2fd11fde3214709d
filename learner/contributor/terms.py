"""The terms of a learner: by what its contributors train."""

import json
from dataclasses import dataclass
from typing import Self

from learner.merging.merge_settings import MergeSettings
from learner.objective.menu import MENU
from learner.step_settings import StepSettings
from node.errors import StartupError
from node.values.contribution import MergeTerms


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms on which contributors train."""

    step: StepSettings
    merge: MergeSettings
    batch_groups: int
    """Groups of a step."""

    @classmethod
    def of(cls, told: MergeTerms) -> Self:
        """Read terms.

        Raises:
            StartupError: they are of another release, or name an objective that is not built in: code of
                somebody's own is not imported because a learner names it.
        """
        try:
            # json's own reader: settings may be infinite.
            step = StepSettings.model_validate(json.loads(told.step_settings))
            merge = MergeSettings.model_validate(json.loads(told.merge_settings))
            if told.batch_groups < 1:
                raise ValueError(f"batches of {told.batch_groups} groups")
        except ValueError as error:
            raise StartupError(
                f"the learner's terms cannot be read: {error}", fix="Run the same release everywhere."
            ) from error
        if step.objective not in MENU:
            raise StartupError(
                f"the learner's objective is {step.objective!r}, and a contributor takes built-in ones alone",
                fix="Choose one of the menu for the run, or unset learner.merge.",
            )
        return cls(step, merge, told.batch_groups)
