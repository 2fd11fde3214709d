"""The objectives by name, free of torch: what a configuration is checked against."""

import importlib
import pkgutil
import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from learner.objective import losses, sample_size
from learner.objective import options as o

_GEPO: Final = "learner.objective.losses.families.gepo"
_GRPO: Final = "learner.objective.losses.families.grpo"
_RATIOS: Final = "learner.objective.losses.families.ratios"

_FILES: Final = {
    module.name: importlib.import_module(f"{losses.__name__}.{module.name}").ENTRY
    for module in pkgutil.iter_modules(losses.__path__)
    if not module.ispkg
}
"""Objectives that are a file each; see ``losses``."""

MENU: Final[Mapping[str, o.MenuEntry]] = _FILES | {
    "version_aware": o.MenuEntry(f"{_GEPO}:version_aware", o.VersionAwareOptions, is_separable=False),
    "version_aware_kl": o.MenuEntry(f"{_GEPO}:version_aware_kl", o.VersionAwareKlOptions),
    "gepo": o.MenuEntry(f"{_GEPO}:gepo", o.ClipOptions),
    "gepo_mean": o.MenuEntry(f"{_GEPO}:gepo_mean", o.ClipOptions),
    "gepo_plus": o.MenuEntry(f"{_GEPO}:gepo_plus", o.GepoPlusOptions),
    "gepo_defensive": o.MenuEntry(f"{_GEPO}:gepo_defensive", o.DefensiveOptions),
    "eqp": o.MenuEntry(f"{_GEPO}:eqp", o.ClipOptions, is_separable=False),
    "grpo": o.MenuEntry(f"{_GRPO}:grpo", o.ClipOptions, sample=sample_size.of_clipped),
    "dr_grpo": o.MenuEntry(f"{_GRPO}:dr_grpo", o.ClipOptions, sample=sample_size.of_clipped),
    "bnpo": o.MenuEntry(f"{_GRPO}:bnpo", o.ClipOptions, sample=sample_size.of_clipped),
    "dapo": o.MenuEntry(f"{_GRPO}:dapo", o.DapoOptions, sample=sample_size.of_clipped),
    "rloo": o.MenuEntry(f"{_GRPO}:rloo", o.ClipOptions, sample=sample_size.of_clipped),
    "reinforce_plus_plus": o.MenuEntry(
        f"{_GRPO}:reinforce_plus_plus", o.ClipOptions, sample=sample_size.of_clipped
    ),
    "reinforce": o.MenuEntry(f"{_GRPO}:reinforce"),
    "dg": o.MenuEntry(f"{_GRPO}:dg", o.DelightOptions),
    "gspo": o.MenuEntry(f"{_RATIOS}:gspo", o.GspoOptions),
    "cispo": o.MenuEntry(f"{_RATIOS}:cispo", o.CispoOptions, sample=sample_size.of_bounded),
    "tis": o.MenuEntry(f"{_RATIOS}:tis", o.TruncatedOptions, sample=sample_size.of_truncated),
    "mis_geometric": o.MenuEntry(f"{_RATIOS}:mis_geometric", o.GeometricMaskedOptions),
    "decoupled_ppo": o.MenuEntry(
        f"{_RATIOS}:decoupled_ppo", o.DecoupledOptions, sample=sample_size.of_decoupled
    ),
    "dppo_tv": o.MenuEntry(f"{_RATIOS}:dppo_tv", o.TotalVariationOptions),
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


def weighed_sample(name: str, options: Mapping[str, Any]) -> sample_size.WeighedSample:
    """Return what an objective's weights leave of a sample; not known of one that is given by its path."""
    known = None
    if name in MENU:
        entry = MENU[name]
        known = entry.sample(entry.options.model_validate(dict(options)))
    return known or sample_size.WeighedSample(name, None)
