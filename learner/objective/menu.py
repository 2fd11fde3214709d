"""The objectives by name, free of torch: what a configuration is checked against."""

from dataclasses import dataclass
from typing import Final

from learner.objective import options as o


@dataclass(frozen=True, slots=True)
class Entry:
    """Where an objective is, and what there is to know of it before torch is imported."""

    path: str
    """``package.module:function``"""
    options: type[o.Options]
    is_separable: bool = True
    """Whether the gradient of a row depends on no other row's learner logprobs; rewards, behaviour
    logprobs and masks of the whole batch are data, and may be used."""


_GROUP: Final = "learner.objective.group_objectives"
_SEQUENCE: Final = "learner.objective.sequence_objectives"
_TOKEN: Final = "learner.objective.token_objectives"

MENU: Final = {
    "gepo": Entry(f"{_GROUP}:gepo", o.ClipOptions),
    "gspo": Entry(f"{_SEQUENCE}:gspo", o.GspoOptions),
    "grpo": Entry(f"{_TOKEN}:grpo", o.ClipOptions),
}
"""Name -> entry. An objective of one's own has no name: it is given by its import path."""


def unknown_objective(name: str) -> str:
    """Say that there is no such name, and which there are."""
    return f"there is no objective {name!r}; there are {', '.join(sorted(MENU))}, and package.module:function"
