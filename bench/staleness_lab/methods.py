"""The methods compared: objectives of the registry with their published numbers, and what goes around them."""

from dataclasses import dataclass
from typing import Any

import torch

from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome
from learner.objective.registry import Objective, load_objective
from learner.objective.menu import MENU


@dataclass(frozen=True, slots=True)
class Method:
    """An objective, the outer discount of old groups, and the learning-rate factor."""

    objective: Objective

    def batch(self, **fields: Any) -> ObjectiveBatch:
        """Give the objective what it needs of a step."""
        return ObjectiveBatch(**fields, proximal_logprob=fields["learner_logprob"].detach())

    def rate_factor(self, outcome: ObjectiveOutcome) -> float:
        return 1.0


def load_method(name: str) -> Method:
    return Method(load_objective(name))
