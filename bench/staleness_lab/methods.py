"""The methods compared: objectives of the registry, and what may go around them.

A method is an objective, an outer factor for old groups, a learning-rate factor, and the way a
step is taken. All four are the learner's own code; what is decided here is which go together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome
from learner.objective.formulas.divergence import group_sample_size_ratio
from learner.objective.menu import MENU
from learner.objective.registry import Objective, load_objective


@dataclass(frozen=True, slots=True)
class Recipe:
    """Parts of a method, by names."""

    objective: str
    options: Mapping[str, Any] = field(default_factory=dict)
    discount: Literal["none", "sample_size"] = "none"
    scales_rate: bool = False
    """Whether VCPO's effective-sample-size factor scales the learning rate of each step."""

    def changed(self, changes: Mapping[str, Any]) -> "Recipe":
        """Return the recipe with other numbers: its own fields by name, else options."""
        own = {each.name for each in fields(self)}
        around = {name: value for name, value in changes.items() if name in own}
        inside = {name: value for name, value in changes.items() if name not in own}
        return replace(self, options={**self.options, **inside}, **around)

    def __str__(self) -> str:
        """Write the recipe with all its numbers as they are at present."""
        numbers = load_objective(self.objective, self.options).options.model_dump()
        plain = Recipe(self.objective)
        for name in ("discount", "scales_rate"):
            if getattr(self, name) != getattr(plain, name):
                numbers[name] = getattr(self, name)
        return f"{self.objective}({', '.join(f'{name}={value}' for name, value in numbers.items())})"


_FORM: Final = "bench.staleness_lab.forms:form"
_UNDIVIDED: Final = "bench.staleness_lab.forms:undivided"
_FORMER: Final = {"measures": True, "fades": True, "shares": True}

FORMS: Final = {
    "plain": Recipe(_FORM),
    "plain, weighs completions": Recipe(_FORM, {"weighs": "completions"}),
    "plain, weighs failures": Recipe(_FORM, {"weighs": "failures"}),
    "plain, weighs nothing": Recipe(_FORM, {"weighs": "nothing"}),
    "plain, leaves nothing alone": Recipe(_FORM, {"most_nats": 99.0, "least_nats": 99.0}),
    "plain, at most 0.1 nats": Recipe(_FORM, {"most_nats": 0.1}),
    "plain, measured": Recipe(_FORM, {"measures": True}),
    "former": Recipe(_FORM, _FORMER),
    "former, supposed": Recipe(_FORM, {**_FORMER, "measures": False}),
    "former, without q/E": Recipe(_FORM, {**_FORMER, "shares": False}),
    "former, without f": Recipe(_FORM, {**_FORMER, "fades": False}),
    "undivided, weighs completions": Recipe(_UNDIVIDED, {"weighs": "completions"}),
    "undivided, weighs nothing": Recipe(_UNDIVIDED, {"weighs": "nothing"}),
}
"""The default, and what it is made of, one part at a time; see ``forms``."""

RIVALS: Final = {
    "m2po": Recipe("bench.staleness_lab.rivals:m2po"),
    "vcpo": Recipe("bench.staleness_lab.rivals:vcpo", scales_rate=True),
    "drpo": Recipe("bench.staleness_lab.rivals:drpo"),
}

COMPOSED: Final = {
    "version_aware+discount": Recipe("version_aware", discount="sample_size"),
    "decoupled_ppo_log_linear": Recipe("decoupled_ppo", {"proximal": "log_linear"}),
}
"""Beside every entry of the registry's menu, which is its own recipe."""

RECIPES: Final = {name: Recipe(name) for name in MENU} | COMPOSED | FORMS | RIVALS


@dataclass(frozen=True, slots=True)
class Method:
    """A recipe, ready to be followed."""

    objective: Objective
    discounts: bool
    """By the effective sample size of a group."""
    scales_rate: bool

    @classmethod
    def named(cls, name: str, changes: Mapping[str, Any] | None = None) -> "Method":
        """Return a method of ``RECIPES``, with ``changes`` as ``Recipe.changed`` has them.

        Raises:
            KeyError: there is no such recipe.
            ValueError: the objective has no such option, or does not allow the value.
        """
        recipe = RECIPES[name].changed(changes or {})
        return cls(
            objective=load_objective(recipe.objective, recipe.options),
            discounts=recipe.discount == "sample_size",
            scales_rate=recipe.scales_rate,
        )

    def outcome(self, batch: ObjectiveBatch) -> ObjectiveOutcome:
        """Return loss and weights, old groups discounted."""
        if self.discounts:
            log_ratio = batch.learner_mean.detach() - batch.behaviour_mean
            batch = replace(batch, discount=group_sample_size_ratio(log_ratio, batch.groups))
        return self.objective(batch)
