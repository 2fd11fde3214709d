"""Messages for wrong settings: the rule that is broken and what to write instead."""

import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from node.config.setting_sources import Setting, environment_name
from node.errors import ConfigError

_UNITS: Final = {
    "s": "seconds", "bytes": "bytes", "tokens": "tokens", "versions": "versions", "groups": "groups",
}  # fmt: skip
"""Suffix of a key -> its unit."""

_LISTS: Final = frozenset({"tuple_type", "list_type"})
_NOT_A_NUMBER: Final = frozenset({"float_parsing", "float_type", "int_parsing", "int_type", "int_from_float"})

REMOVED: Final = {
    "coordinator.shown_samplers": (
        "0.4",
        "Leave it out, and let Prometheus read the pages of those samplers.",
    ),
    "relay.spool_bytes": ("0.4", "Leave it out: a relay keeps no groups, samplers do."),
    "relay.spool_groups": ("0.4", "Leave it out: a relay keeps no groups, samplers do."),
    "sampler.rollout_via": ("0.4", "Name the relay in sampler.relays."),
}
"""Key -> the release that removed it, what to do now."""


def faults_of(
    error: ValidationError, *, section: str, model: type[BaseModel], settings: Mapping[str, Setting]
) -> Iterator[ConfigError]:
    """Yield a fault for every violation in one section; ``settings`` are those that were given."""
    for details in error.errors(include_url=False):
        if not details["loc"]:
            yield _fault_of_several(details, section=section, settings=settings)
        # A default made from another key's value: that other key has a fault of its own.
        elif details["type"] != "default_factory_not_called":
            yield _fault_of_one(details, section=section, model=model, settings=settings)


def _fault_of_several(details: ErrorDetails, *, section: str, settings: Mapping[str, Setting]) -> ConfigError:
    source = ", ".join(dict.fromkeys(setting.source for setting in settings.values())) or "defaults"
    given = {key: setting.value for key, setting in settings.items()}
    fix = "Change one of these keys."
    return ConfigError(key=section, value=given, source=source, rule=_rule(details), fix=fix)


def _fault_of_one(
    details: ErrorDetails, *, section: str, model: type[BaseModel], settings: Mapping[str, Setting]
) -> ConfigError:
    given = {key: setting.value for key, setting in settings.items()}
    key, *inner = map(str, details["loc"])
    name = ".".join((section, key, *inner))
    source = settings[key].source if key in settings else "nowhere"
    while inner and isinstance(table := given.get(key), dict) and (of_table := table_model(model, key)):
        section, model, given = f"{section}.{key}", of_table, table
        key, *inner = inner
    if key not in given:
        how = f"--set {section}.{key}=... or {environment_name(section, key)}"
        fix = f"Write it under [{section}] in a configuration file, or use {how}."
        rule = "is required" if details["type"] == "missing" else _rule(details)
        return ConfigError(key=name, value=None, source="nowhere", rule=rule, fix=fix)
    if details["type"] == "extra_forbidden" and not inner:
        rule = f"[{section}] has no such key"
        fix = _fix_of_unknown(key.partition(".")[0], known=model.model_fields)
        if name in REMOVED:
            release, fix = REMOVED[name]
            rule = f"was removed in {release}"
    else:
        rule, fix = _rule_and_fix(details, key=key, model=model)
    return ConfigError(key=name, value=given[key], source=source, rule=rule, fix=fix)


def table_model(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """Return the model of a key that is a table; None where it is something else."""
    annotation = model.model_fields[key].annotation
    kinds = (annotation, *get_args(annotation))
    return next((one for one in kinds if isinstance(one, type) and issubclass(one, BaseModel)), None)


def is_table(model: type[BaseModel], key: str) -> bool:
    """Return whether a key holds a table, of known keys or of any."""
    field = model.model_fields.get(key)
    return field is not None and (get_origin(field.annotation) is dict or table_model(model, key) is not None)


def unknown_section(setting: Setting, *, known: Collection[str]) -> ConfigError:
    """Return the fault of a setting whose section does not exist."""
    close = difflib.get_close_matches(setting.section, known, n=1)
    meant = f"Did you mean [{close[0]}]? " if close else ""
    return ConfigError(
        key=setting.name,
        value=setting.value,
        source=setting.source,
        rule=f"there is no section [{setting.section}]",
        fix=f"{meant}Sections are {', '.join(known)}.",
    )


def _rule_and_fix(details: ErrorDetails, *, key: str, model: type[BaseModel]) -> tuple[str, str]:
    unit = _UNITS.get(key.rpartition("_")[2])
    if details["type"] in _NOT_A_NUMBER and unit is not None:
        return f"must be a plain number of {unit}", "Leave the unit out: the key's name has it."
    if details["type"] in _LISTS:
        return "must be a list", f"Write {json.dumps([details['input']], default=str)}."
    field = model.model_fields.get(key)
    # A role, or another key, may require what is None by default: node.coordinator, for example.
    default = None if field is None or field.default_factory is not None else field.get_default()
    if default is None or (field is not None and field.is_required()):
        return _rule(details), "Change it where it is set."
    return _rule(details), f"Change it, or leave it out: the default is {default!r}."


def _rule(details: ErrorDetails) -> str:
    message = details["msg"].removeprefix("Value error, ")
    return re.sub(r"^(Input|String|Value) should ", "must ", message)


def _fix_of_unknown(key: str, *, known: Collection[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    if not close:
        return f"Known keys are {', '.join(known)}."
    unit = _UNITS.get(close[0].rpartition("_")[2])
    return f"Did you mean {close[0]}{f', which is in {unit}' if unit else ''}?"
