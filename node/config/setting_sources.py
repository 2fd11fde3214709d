"""The sources of settings: files, the environment, flags. What the settings mean is decided elsewhere.

Every reader yields its settings, later ones winning, and the faults it meets.
"""

import contextlib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.errors import ConfigError

ENVIRONMENT_PREFIX: Final = "HETERORL_"


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and the source that set it."""

    section: str
    key: str
    value: object
    source: str
    is_text: bool = False
    """Whether ``value`` is text that has yet to be parsed (environment, flags)."""

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}"


Reading = Iterable[Setting | ConfigError]


def read_files(paths: Iterable[Path]) -> Iterator[Setting | ConfigError]:
    """Read TOML files of ``[section]`` tables; later files win, key by key."""
    for path in paths:
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            yield _bad_file(path, f"cannot be read: {error.strerror}", fix="Check the path.")
            continue
        except ValueError as error:  # both of TOML's and UTF-8's faults
            yield _bad_file(path, f"is not TOML: {error}", fix="Correct the file.")
            continue
        for section, table in content.items():
            if isinstance(table, dict):
                source = f"{path} [{section}]"
                yield from (Setting(section, key, value, source) for key, value in table.items())
            else:
                rule = "every key belongs in a section"
                fix = f"Put it under one, such as [node], or write [{section}] for a section."
                yield ConfigError(key=section, value=table, source=str(path), rule=rule, fix=fix)


def read_environment(environ: Mapping[str, str]) -> Iterator[Setting | ConfigError]:
    """Read ``HETERORL_SECTION__KEY``, or ``HETERORL_SECTION__TABLE__KEY`` for a key of a table.

    Names without the double underscore are ignored: Kubernetes makes ``HETERORL_COORDINATOR_PORT``
    from the name of a service.
    """
    for name in sorted(environ):
        section, separator, key = name.removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
        if name.startswith(ENVIRONMENT_PREFIX) and separator:
            source = f"environment {name}"
            yield Setting(section, key.replace("__", "."), environ[name], source, is_text=True)


def read_flags(
    shorthands: Mapping[str, tuple[str, str]], assignments: Iterable[str]
) -> Iterator[Setting | ConfigError]:
    """Read flags for single keys (flag -> (section.key, value)), then each ``--set section.key=value``.

    A key may be ``table.key``, for one key of a table.
    """
    for flag, (name, value) in shorthands.items():
        section, _, key = name.partition(".")
        yield Setting(section, key, value, f"flag {flag}", is_text=True)
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        section, dot, key = name.strip().partition(".")
        if equals and dot and section and key:
            yield Setting(section, key, value, "flag --set", is_text=True)
        else:
            rule, fix = "must be section.key=value", "For example: --set node.drain_timeout_s=60"
            yield ConfigError(key="--set", value=assignment, source="flag --set", rule=rule, fix=fix)


def environment_name(section: str, key: str) -> str:
    """Return the name of the environment variable that sets a key; ``section.table`` names a table's."""
    return f"{ENVIRONMENT_PREFIX}{section}__{key}".replace(".", "__").upper()


def value_of_text(text: str, *, has_type: bool) -> object:
    """Parse a list or table, in TOML or JSON; other text too where no ``has_type`` key says what it is.

    Anything else, such as ``[::1]:7700``, stays text: pydantic reads numbers, booleans and paths from it.
    """
    if has_type and not text.lstrip().startswith(("[", "{")):
        return text
    with contextlib.suppress(ValueError):
        return tomllib.loads(f"value = {text}")["value"]
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text


def _bad_file(path: Path, rule: str, *, fix: str) -> ConfigError:
    return ConfigError(key="--config", value=str(path), source="flag --config", rule=rule, fix=fix)
