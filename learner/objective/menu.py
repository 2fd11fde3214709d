"""The objectives by name, free of torch: what a configuration is checked against."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from learner.objective import options as o


@dataclass(frozen=True, slots=True)
class Entry:
    """An objective's place, and all that must be known of it before torch is imported."""

    path: str
    """``package.module:function``"""
    options: type[o.Options] = o.Options
    is_separable: bool = True
    """Whether the gradient of a row depends on no other row's learner logprobs; rewards, behaviour
    logprobs and masks of the whole batch are data, and may be used."""


_GROUP: Final = "learner.objective.group_objectives"
_TOKEN: Final = "learner.objective.token_objectives"
_RATIO: Final = "learner.objective.ratio_objectives"

MENU: Final = {
    "drift_aware": Entry("learner.objective.drift:drift_aware", o.DriftAwareOptions),
    "version_aware": Entry(f"{_GROUP}:version_aware", o.VersionAwareOptions, is_separable=False),
    "version_aware_kl": Entry(f"{_GROUP}:version_aware_kl", o.VersionAwareKlOptions),
    "gepo": Entry(f"{_GROUP}:gepo", o.ClipOptions),
    "gepo_mean": Entry(f"{_GROUP}:gepo_mean", o.ClipOptions),
    "gepo_plus": Entry(f"{_GROUP}:gepo_plus", o.GepoPlusOptions),
    "gepo_defensive": Entry(f"{_GROUP}:gepo_defensive", o.DefensiveOptions),
    "eqp": Entry(f"{_GROUP}:eqp", o.ClipOptions, is_separable=False),
    "grpo": Entry(f"{_TOKEN}:grpo", o.ClipOptions),
    "dr_grpo": Entry(f"{_TOKEN}:dr_grpo", o.ClipOptions),
    "bnpo": Entry(f"{_TOKEN}:bnpo", o.ClipOptions),
    "dapo": Entry(f"{_TOKEN}:dapo", o.DapoOptions),
    "rloo": Entry(f"{_TOKEN}:rloo", o.ClipOptions),
    "reinforce_plus_plus": Entry(f"{_TOKEN}:reinforce_plus_plus", o.ClipOptions),
    "reinforce": Entry(f"{_TOKEN}:reinforce"),
    "dg": Entry(f"{_TOKEN}:dg", o.DelightOptions),
    "gspo": Entry(f"{_RATIO}:gspo", o.GspoOptions),
    "topr": Entry(f"{_RATIO}:topr", o.ToprOptions),
    "sapo": Entry(f"{_RATIO}:sapo", o.SapoOptions),
    "cispo": Entry(f"{_RATIO}:cispo", o.CispoOptions),
    "tis": Entry(f"{_RATIO}:tis", o.TruncatedOptions),
    "mis_geometric": Entry(f"{_RATIO}:mis_geometric", o.GeometricMaskedOptions),
    "decoupled_ppo": Entry(f"{_RATIO}:decoupled_ppo", o.DecoupledOptions),
    "dppo_tv": Entry(f"{_RATIO}:dppo_tv", o.TotalVariationOptions),
}
"""Name -> entry: the methods of the papers implemented here, of the staleness report, and GRPO's near kin.
Anything else is given by its import path."""

_IMPORT_PATH: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def check_name(name: str) -> str:
    """Return ``name`` if it is an objective of the menu or could be an import path.

    Raises:
        ValueError: it is neither; lists the names there are.
    """
    if name in MENU or _IMPORT_PATH.fullmatch(name):
        return name
    raise ValueError(
        f"there is no objective {name!r}; there are {', '.join(sorted(MENU))}, and package.module:function"
    )


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Check the options of an objective of the menu; those of an import path are checked when it is loaded.

    Raises:
        ValueError: an option is unknown or out of range; says which and why.
    """
    if name not in MENU:
        return
    try:
        MENU[name].options.model_validate(dict(options))
    except ValidationError as error:
        known = ", ".join(MENU[name].options.model_fields) or "none"
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ValueError(f"{faults}; the options of {name} are {known}") from error
