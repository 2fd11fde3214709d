"""The methods compared: objectives of the registry as published, and what may go around them.

A method is an objective, an outer factor for old groups, a learning-rate factor, and the way a
step is taken. All four are the learner's own code; what is decided here is which go together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import torch
from torch import Tensor

from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome
from learner.objective.menu import MENU
from learner.objective.registry import Objective, load_objective
from learner.objective.staleness import polynomial_discount, sample_size_discount, version_discount

DEFAULT: Final = "version_aware_kl"
"""The method on trial: what is promised of the learner's version-aware weighting is asked of this one."""

_HALF_LIFE_VERSIONS: Final = 64.0
_POWER: Final = 0.5

Discount = Callable[[ObjectiveBatch], Tensor]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a method is made of, by names."""

    objective: str
    options: Mapping[str, object] = field(default_factory=dict)
    discount: Literal["none", "exponential", "polynomial", "sample_size"] = "none"
    scales_rate: bool = False
    """Whether VCPO's effective-sample-size factor scales the learning rate of each step."""
    fast_steps: int = 0
    """SFPO's K; 0: one plain step."""


COMPOSED: Final = {
    "version_aware+exponential": Recipe("version_aware", discount="exponential"),
    "version_aware+polynomial": Recipe("version_aware", discount="polynomial"),
    "version_aware+sample_size": Recipe("version_aware", discount="sample_size"),
    "version_aware_ungated": Recipe("version_aware", {"gate": "none"}),
    "version_aware_always_gated": Recipe("version_aware", {"gate": "always"}),
    "decoupled_ppo_log_linear": Recipe("decoupled_ppo", {"proximal": "log_linear"}),
    "importance_sampling+vcpo": Recipe("importance_sampling", scales_rate=True),
    "tis+vcpo": Recipe("tis", scales_rate=True),
    "grpo+sfpo": Recipe("grpo", fast_steps=3),
}
"""Beside every entry of the registry's menu, which is its own recipe."""

RECIPES: Final = {name: Recipe(name) for name in MENU} | COMPOSED

SFPO_SHARE: Final = 0.8


def described(name: str) -> str:
    """Give a method's recipe with the options that it has at present."""
    recipe = RECIPES[name]
    options = load_objective(recipe.objective, recipe.options).options.model_dump()
    around = {"discount": recipe.discount, "scales_rate": recipe.scales_rate, "fast_steps": recipe.fast_steps}
    plain = Recipe(recipe.objective)
    changed = {key: value for key, value in around.items() if value != getattr(plain, key)}
    numbers = ", ".join(f"{key}={value}" for key, value in (options | changed).items())
    return f"{recipe.objective}({numbers})"


def _exponential(batch: ObjectiveBatch) -> Tensor:
    return _by_age(batch, lambda age: version_discount(age, half_life_versions=_HALF_LIFE_VERSIONS))


def _polynomial(batch: ObjectiveBatch) -> Tensor:
    return _by_age(batch, lambda age: polynomial_discount(age, power=_POWER))


def _by_age(batch: ObjectiveBatch, discount: Callable[[int], float]) -> Tensor:
    ages, index = torch.unique(batch.staleness_versions, return_inverse=True)
    return torch.tensor([discount(int(age)) for age in ages])[index]


def _sample_size(batch: ObjectiveBatch) -> Tensor:
    return sample_size_discount(batch.learner_mean.detach() - batch.behaviour_mean, batch.groups)


_DISCOUNTS: Final[dict[str, Discount]] = {
    "exponential": _exponential,
    "polynomial": _polynomial,
    "sample_size": _sample_size,
}


@dataclass(frozen=True, slots=True)
class Method:
    """A recipe, ready to be followed."""

    objective: Objective
    discount: Discount | None
    scales_rate: bool
    fast_steps: int

    @classmethod
    def named(cls, name: str) -> "Method":
        """Find a method.

        Raises:
            KeyError: there is no such recipe.
        """
        recipe = RECIPES[name]
        return cls(
            objective=load_objective(recipe.objective, recipe.options),
            discount=_DISCOUNTS.get(recipe.discount),
            scales_rate=recipe.scales_rate,
            fast_steps=recipe.fast_steps,
        )

    def outcome(self, batch: ObjectiveBatch) -> ObjectiveOutcome:
        """Give loss and weights, old groups discounted."""
        if self.discount is not None:
            batch = replace(batch, discount=self.discount(batch))
        return self.objective(batch)
