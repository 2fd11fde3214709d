"""The example configurations: they load, name every key there is, and show the defaults there are."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from deploy.check import DEPLOY, ROLES
from node.config.settings import Resolved, load
from node.errors import ConfigError, NotReadyError

EXAMPLES = [pytest.param(role, DEPLOY / "config" / f"{role}.toml", id=role) for role in ROLES]


def resolved(role: str, file: Path) -> Resolved:
    return load(roles=[role], files=[file], environ={})


@pytest.mark.parametrize(("role", "file"), EXAMPLES)
def test_an_example_with_an_unknown_key_in_any_section_is_refused_by_name(
    role: str, file: Path, tmp_path: Path
) -> None:
    damaged, text = tmp_path / file.name, file.read_text()
    for section in ("node", "telemetry", role):
        text = text.replace(f"[{section}]", f"[{section}]\nno_such_key = 1")
    damaged.write_text(text)
    with pytest.raises(NotReadyError) as refused:
        resolved(role, damaged)
    unknown = [fault.key for fault in refused.value.faults if isinstance(fault, ConfigError)]
    assert sorted(unknown) == sorted(f"{section}.no_such_key" for section in ("node", "telemetry", role))


@pytest.mark.parametrize(("role", "file"), EXAMPLES)
def test_an_example_names_every_key_and_shows_every_default(role: str, file: Path, tmp_path: Path) -> None:
    active = {
        f"{section}.{key}" for section, table in tomllib.loads(file.read_text()).items() for key in table
    }
    shown = shown_defaults(file.read_text())
    values = {value.name: value for value in resolved(role, file).values}
    assert active | shown.keys() == values.keys()
    # A value like "auto" is another one by the time it is resolved.
    given = tmp_path / file.name
    given.write_text(re.sub(r"(?m)^#(\w+ = (?!unset$))", r"\1", file.read_text()))
    as_given = {value.name: value.value for value in resolved(role, given).values}
    shown = {name: None if value is None else as_given[name] for name, value in shown.items()}
    assert shown == {name: value.value for name, value in values.items() if value.source == "default"}


def shown_defaults(text: str) -> dict[str, Any]:
    """Return the values of the keys behind ``#``; None where it says ``unset``."""
    shown: dict[str, Any] = {}
    section = ""
    for line in text.splitlines():
        if header := re.fullmatch(r"\[(\w+)\]", line):
            section = header[1]
        elif hidden := re.fullmatch(r"#(\w+) = (.*)", line):
            value = None if hidden[2] == "unset" else tomllib.loads(f"value = {hidden[2]}")["value"]
            shown[f"{section}.{hidden[1]}"] = value
    return shown
