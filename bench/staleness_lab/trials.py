"""Settings tried for each method before it is frozen: the same number for each, the published one first.

A setting is a multiple of the task's learning rate and changes to the method's own numbers. Settings are
taken from the product of all ranges by how many of them leave the published value, fewest first; which of
equally many come first is drawn by the method's name. A method with few numbers is tried at more rates.
"""

import hashlib
import itertools
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from pydantic import ValidationError

from bench.staleness_lab.methods import RECIPES, Recipe
from learner.objective.menu import MENU
from learner.objective.options import ClipOptions

TRIALS: Final = 9
"""Number of settings of each method."""

_RATES: Final = (1.0, 1 / 3, 3.0, 0.6, 1.7, 0.2, 5.0, 0.1, 10.0)
"""Multiples of a task's learning rate: three of them, and more only where there is little else to try."""
_LEAST_RATES: Final = 3

Changes = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """The numbers a method runs with."""

    rate: float = 1.0
    """Multiple of the task's learning rate."""
    changes: Changes = field(default_factory=dict)
    """To the recipe, as ``Recipe.changed`` has them."""

    def __str__(self) -> str:
        """Write the setting as it stands in tables."""
        changes = [f"{name} {value}" for name, value in self.changes.items()]
        return ", ".join([f"rate x {self.rate:.3g}", *changes])


_CLIP: Final = (
    {"clip_high": 0.28},
    {"clip_low": 0.1, "clip_high": 0.1},
    {"clip_low": 0.4, "clip_high": 0.4},
)
"""DAPO's clip-higher; half and twice the usual clip."""
_DUAL: Final = ({"dual_clip": 3.0},)
_CLIPPED: Final = (_CLIP, _DUAL)

RANGES: Final[Mapping[str, Sequence[Sequence[Changes]]]] = {
    **{name: _CLIPPED for name in ("grpo", "dr_grpo", "bnpo", "rloo", "reinforce_plus_plus")},
    **{name: _CLIPPED for name in ("gepo", "gepo_mean", "eqp")},
    "gepo_plus": (({"threshold_nats": 0.001}, {"threshold_nats": 0.1}), _CLIP),
    "gepo_defensive": (({"learner_share": 0.1}, {"learner_share": 0.5}), _CLIP),
    "gspo": (
        (
            {"clip_low": 3e-3, "clip_high": 4e-3},
            {"clip_low": 3e-2, "clip_high": 4e-2},
            {**_CLIP[0], "clip_low": 0.2},
        ),
        _DUAL,
    ),
    "topr": (({"is_length_normalised": True},),),
    "dapo": (({"clip_high": 0.2}, {"clip_high": 0.4}), ({"overlong_buffer_share": 0.0},)),
    "cispo": (({"clip_high": 1.0}, {"clip_high": 9.0}),),
    "tis": (({"ceiling": 1.0}, {"ceiling": 5.0}, {"ceiling": 10.0}), _CLIP),
    "mis_geometric": (({"most": 1.5, "least": 0.67}, {"most": 1.05, "least": 0.95}), ({"veto": 1e-4},)),
    "decoupled_ppo": (({"behaviour_cap": 5.0}, {"behaviour_cap": 5.0, "beyond_cap": "truncate"}), _CLIP),
    "decoupled_ppo_log_linear": (({"behaviour_cap": 5.0},), _CLIP),
    "dppo_tv": (({"limit": 0.1}, {"limit": 0.3}), ({"penalty": 0.0},)),
    "tis+vcpo": (({"ceiling": 1.0}, {"ceiling": 5.0}),),
    "version_aware": (({"gate": "always"}, {"gate": "none"}), ({"power": 1.0},)),
    "version_aware_kl": (({"gate": "always"}, {"gate": "none"}), ({"scale_nats": 0.1}, {"scale_nats": 2.0})),
    "version_aware+discount": (({"discount": "polynomial"}, {"discount": "sample_size"}),),
    "grpo+sfpo": (({"fast_steps": 2}, {"fast_steps": 5}), _CLIP),
}
"""Method -> for each of its numbers, the alternatives to the published value: those its paper or its authors'
code have, else half and twice. What is not listed follows ``derived_ranges``."""


def trials(method: str) -> list[Setting]:
    """Return the ``TRIALS`` settings of a method, the published one first."""
    ranges = RANGES[method] if method in RANGES else derived_ranges(RECIPES[method])
    choices: list[Sequence[Changes]] = [({}, *alternatives) for alternatives in ranges]
    least = math.ceil(TRIALS / math.prod(map(len, choices)))
    rates = _RATES[: max(_LEAST_RATES, least)]
    order = np.random.default_rng(list(hashlib.sha256(method.encode()).digest()))
    ranked = []
    for rate, changed in itertools.product(rates, itertools.product(*choices)):
        count = (rate != 1.0) + sum(map(bool, changed))
        setting = Setting(rate, {name: value for each in changed for name, value in each.items()})
        ranked.append((count, order.random(), setting))
    ranked.sort(key=lambda one: one[:2])
    return [setting for _, _, setting in ranked[:TRIALS]]


def derived_ranges(recipe: Recipe) -> list[Sequence[Changes]]:
    """Return half and twice of each finite number, every other value of a choice, and the usual clips."""
    ranges: list[Sequence[Changes]] = []
    model = MENU[recipe.objective].options
    for name, about in model.model_fields.items():
        if name in ClipOptions.model_fields:
            continue
        default = recipe.options.get(name, about.default)
        if typing.get_origin(about.annotation) is Literal:
            values = [value for value in typing.get_args(about.annotation) if value != default]
        elif isinstance(default, bool):
            values = [not default]
        elif isinstance(default, int | float) and math.isfinite(default) and default:
            values = (
                [default / 2, default * 2]
                if isinstance(default, float)
                else [max(1, default // 2), default * 2]
            )
        else:
            values = []
        allowed = [{name: value} for value in values if _is_allowed(model, {**recipe.options, name: value})]
        if allowed:
            ranges.append(allowed)
    return [*ranges, _CLIP] if issubclass(model, ClipOptions) else ranges


def _is_allowed(model: type[Any], options: Changes) -> bool:
    try:
        model.model_validate(dict(options))
    except ValidationError:
        return False
    return True
