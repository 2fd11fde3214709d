"""Messages for wrong settings: the rule that is broken and what to write instead."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Final, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from node.config.setting_sources import Setting, environment_name, setting_value
from node.errors import ConfigError

_SECONDS: Final = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0,
}  # fmt: skip
_BYTES: Final = {
    "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30,
}  # fmt: skip
_UNITS: Final = {
    "s": ("seconds", _SECONDS),
    "bytes": ("bytes", {**_BYTES, "bytes": 1.0}),
    "tokens": ("tokens", {"tokens": 1.0}),
    "versions": ("versions", {"versions": 1.0}),
    "groups": ("groups", {"groups": 1.0}),
}
"""Suffix of a key -> its unit, and the factors of other ways to write an amount."""

_LISTS: Final = frozenset({"tuple_type", "list_type"})
_NOT_A_NUMBER: Final = frozenset({"float_parsing", "float_type", "int_parsing", "int_type", "int_from_float"})


def faults_of(
    error: ValidationError, *, section: str, model: type[BaseModel], settings: Mapping[str, Setting]
) -> Iterator[ConfigError]:
    """Yield a fault for every violation in one section; ``settings`` are those that were given."""
    for details in error.errors(include_url=False):
        # A default made from another key's value: that other key has a fault of its own.
        if details["type"] != "default_factory_not_called":
            yield _fault_of(details, section=section, model=model, settings=settings)


def _fault_of(
    details: ErrorDetails, *, section: str, model: type[BaseModel], settings: Mapping[str, Setting]
) -> ConfigError:
    if not details["loc"]:  # a rule about several keys
        source = ", ".join(dict.fromkeys(setting.source for setting in settings.values())) or "defaults"
        given = {key: setting.value for key, setting in settings.items()}
        fix = "Change one of these keys."
        return ConfigError(key=section, value=given, source=source, rule=_rule(details), fix=fix)
    key = str(details["loc"][0])
    name = ".".join((section, *map(str, details["loc"])))
    if len(details["loc"]) > 1 and key in settings and (table := table_model(model, key)) is not None:
        inner = details.copy()
        inner["loc"] = details["loc"][1:]
        return _fault_of(inner, section=f"{section}.{key}", model=table, settings=_settings_in(settings[key]))
    if key not in settings:
        how = f"--set {section}.{key}=... or {environment_name(section, key)}"
        fix = f"Write it under [{section}] in a configuration file, or use {how}."
        rule = "is required" if details["type"] == "missing" else _rule(details)
        return ConfigError(key=name, value=None, source="nowhere", rule=rule, fix=fix)
    setting = settings[key]
    if details["type"] == "extra_forbidden" and len(details["loc"]) == 1:
        rule = f"[{section}] has no such key"
        fix = _fix_of_unknown(key.partition(".")[0], setting.value, known=tuple(model.model_fields))
    else:
        rule, fix = _rule_and_fix(details, key=key, model=model)
    return ConfigError(key=name, value=setting.value, source=setting.source, rule=rule, fix=fix)


def table_model(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """Return the model of a key that is a table; None where it is something else."""
    annotation = model.model_fields[key].annotation
    kinds = (annotation, *get_args(annotation))
    return next((one for one in kinds if isinstance(one, type) and issubclass(one, BaseModel)), None)


def is_table(model: type[BaseModel], key: str) -> bool:
    """Return whether a key holds a table, of known keys or of any."""
    field = model.model_fields.get(key)
    return field is not None and (get_origin(field.annotation) is dict or table_model(model, key) is not None)


def _settings_in(table: Setting) -> dict[str, Setting]:
    """Return the keys of a table that was given, each as a setting."""
    value = setting_value(table, is_optional=False)
    given = value if isinstance(value, dict) else {}
    return {name: Setting(table.name, name, one, table.source, False) for name, one in given.items()}


def unknown_section(setting: Setting, *, known: tuple[str, ...]) -> ConfigError:
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
    unit = _unit_of(key)
    if details["type"] in _NOT_A_NUMBER and unit is not None:
        amount = _in_unit_of(key, details["input"])
        example = "" if amount is None else f" Write {amount:g}."
        return f"must be a plain number of {unit}", f"Leave the unit out: the key's name has it.{example}"
    if details["type"] in _LISTS:
        return "must be a list", f"Write {json.dumps([details['input']], default=str)}."
    field = model.model_fields.get(key)
    if field is None or field.is_required() or field.default_factory is not None:
        return _rule(details), "Change it where it is set."
    default = field.get_default()
    return _rule(details), f"Change it, or leave it out: the default is {default!r}."


def _rule(details: ErrorDetails) -> str:
    message = details["msg"].removeprefix("Value error, ")
    return re.sub(r"^(Input|String|Value) should ", "must ", message)


def _fix_of_unknown(key: str, value: object, *, known: tuple[str, ...]) -> str:
    stem, _, suffix = key.rpartition("_")
    same_in_other_unit = f"{stem}_s"
    if suffix in _SECONDS and suffix != "s" and same_in_other_unit in known:
        seconds = _in_unit_of(same_in_other_unit, f"{value}{suffix}")
        example = "" if seconds is None else f" Write {same_in_other_unit} = {seconds:g}."
        return f"Did you mean {same_in_other_unit}, which is in seconds?{example}"
    close = difflib.get_close_matches(key, known, n=1)
    if not close:
        return f"Known keys are {', '.join(known)}."
    unit = _unit_of(close[0])
    return f"Did you mean {close[0]}{f', which is in {unit}' if unit else ''}?"


def _unit_of(key: str) -> str | None:
    suffix = key.rpartition("_")[2]
    return _UNITS[suffix][0] if suffix in _UNITS else None


def _in_unit_of(key: str, value: object) -> float | None:
    """Return ``5s``, ``500 ms`` or ``4MiB`` as a number in the key's unit; None for anything else."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]+)\s*", str(value))
    _, factors = _UNITS[key.rpartition("_")[2]]
    if match is None or match[2].lower() not in factors:
        return None
    return float(match[1]) * factors[match[2].lower()]
