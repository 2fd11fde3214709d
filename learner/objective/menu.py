"""The objectives by name, free of torch: what a configuration is checked against."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from learner.objective import options as o


@dataclass(frozen=True, slots=True)
class Entry:
    """Where an objective is, and what there is to know of it before torch is imported."""

    path: str
    """``package.module:function``"""
    options: type[o.Options] = o.Options
    is_separable: bool = True
    """Whether the gradient of a row depends on no other row's learner logprobs; rewards, behaviour
    logprobs and masks of the whole batch are data, and may be used."""


_GROUP: Final = "learner.objective.group_objectives"
_SEQUENCE: Final = "learner.objective.sequence_objectives"
_TOKEN: Final = "learner.objective.token_objectives"
_CORRECTED: Final = "learner.objective.corrected_objectives"
_DRIFT: Final = "learner.objective.drift_objective"

MENU: Final = {
    "drift_aware": Entry(f"{_DRIFT}:drift_aware", o.DriftAwareOptions),
    "version_aware": Entry(f"{_GROUP}:version_aware", o.VersionAwareOptions, is_separable=False),
    "version_aware_kl": Entry(f"{_GROUP}:version_aware_kl", o.VersionAwareKlOptions),
    "gepo": Entry(f"{_GROUP}:gepo", o.ClipOptions),
    "gepo_mean": Entry(f"{_GROUP}:gepo_mean", o.ClipOptions),
    "gepo_plus": Entry(f"{_GROUP}:gepo_plus", o.GepoPlusOptions),
    "gepo_defensive": Entry(f"{_GROUP}:gepo_defensive", o.DefensiveOptions),
    "eqp": Entry(f"{_GROUP}:eqp", o.ClipOptions, is_separable=False),
    "gspo": Entry(f"{_SEQUENCE}:gspo", o.GspoOptions),
    "gmpo": Entry(f"{_SEQUENCE}:gmpo", o.GmpoOptions),
    "topr": Entry(f"{_SEQUENCE}:topr", o.ToprOptions),
    "vespo": Entry(f"{_SEQUENCE}:vespo", o.VespoOptions),
    "importance_sampling": Entry(f"{_SEQUENCE}:importance_sampling"),
    "vcpo": Entry(f"{_SEQUENCE}:vcpo", o.VcpoOptions, is_separable=False),
    "grpo": Entry(f"{_TOKEN}:grpo", o.ClipOptions),
    "dr_grpo": Entry(f"{_TOKEN}:dr_grpo", o.ClipOptions),
    "bnpo": Entry(f"{_TOKEN}:bnpo", o.ClipOptions),
    "bnpo_beta": Entry(f"{_TOKEN}:bnpo_beta", o.ClipOptions),
    "dapo": Entry(f"{_TOKEN}:dapo", o.DapoOptions),
    "rloo": Entry(f"{_TOKEN}:rloo", o.ClipOptions),
    "reinforce_plus_plus": Entry(f"{_TOKEN}:reinforce_plus_plus", o.ClipOptions),
    "reinforce": Entry(f"{_TOKEN}:reinforce"),
    "dg": Entry(f"{_TOKEN}:dg", o.DelightOptions),
    "dg_hard": Entry(f"{_TOKEN}:dg_hard", o.HardDelightOptions),
    "kondo": Entry(f"{_TOKEN}:kondo", o.KondoOptions, is_separable=False),
    "sapo": Entry(f"{_TOKEN}:sapo", o.SapoOptions),
    "opsm": Entry(f"{_TOKEN}:opsm", o.SequenceMaskOptions),
    "opmd": Entry(f"{_TOKEN}:opmd", o.MirrorDescentOptions),
    "cispo": Entry(f"{_CORRECTED}:cispo", o.CispoOptions),
    "tis": Entry(f"{_CORRECTED}:tis", o.TruncatedOptions),
    "mis": Entry(f"{_CORRECTED}:mis", o.MaskedOptions),
    "mis_sequence": Entry(f"{_CORRECTED}:mis_sequence", o.SequenceMaskedOptions),
    "mis_geometric": Entry(f"{_CORRECTED}:mis_geometric", o.GeometricMaskedOptions),
    "icepop": Entry(f"{_CORRECTED}:icepop", o.IcePopOptions),
    "decoupled_ppo": Entry(f"{_CORRECTED}:decoupled_ppo", o.DecoupledOptions),
    "dppo_tv": Entry(f"{_CORRECTED}:dppo_tv", o.TotalVariationOptions),
    "m2po": Entry(f"{_CORRECTED}:m2po", o.SecondMomentOptions, is_separable=False),
}
"""Name -> entry. An objective of one's own has no name: it is given by its import path."""

_IMPORT_PATH: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def check_name(name: str) -> str:
    """Return the name of an objective, or what may be its import path.

    Raises:
        ValueError: it is neither; says which names there are.
    """
    if name in MENU or _IMPORT_PATH.fullmatch(name):
        return name
    raise ValueError(
        f"there is no objective {name!r}; there are {', '.join(sorted(MENU))}, and package.module:function"
    )


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Check the options of an objective of the menu; those of an import path show when it is imported.

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
