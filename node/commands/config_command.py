"""``heterorl-node config``: print every key, its value, default, bounds and meaning; start nothing.

The daemon shares the configuration flags of this module.
"""

import argparse
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from node.errors import NotReadyError
from node.exit_code import ExitCode
from node.telemetry.logging import to_json
from node.values.roles import ROLES

if TYPE_CHECKING:
    from node.config.setting_sources import Setting
    from node.config.setting_table import SettingRow
    from node.config.settings import Resolved
    from node.errors import ConfigError

EXAMPLE: Final = """\
  heterorl-node config --role learner                  # every key there is, before anything is configured
  heterorl-node config --role sampler --config sampler.toml --set sampler.threads=4
Keys that are required and not given are named last, on standard error; the exit code is then 2.
"""

SHORTHANDS: Final = {
    "--state-dir": ("node.state_dir", "DIR", "the directory that survives restarts"),
    "--run-file": ("node.run_file", "FILE", "the run's public description, made by init"),
    "--coordinator": ("node.coordinator", "HOST:PORT", "where the coordinator is"),
    "--node-id": ("node.node_id", "ID", "this peer's name in the run"),
    "--token-file": ("node.token_file", "FILE", "a token that lets this peer in the first time"),
    "--log-format": ("telemetry.log_format", "FORMAT", "auto, json or human"),
    "--log-level": ("telemetry.log_level", "LEVEL", "debug, info, warning or error"),
}
"""Flag -> key, metavar, help. Any other key: --set."""


def add_configuration_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the configuration flags."""
    group = parser.add_argument_group(
        "configuration", "Flags win over the environment (HETERORL_SECTION__KEY), that over files."
    )
    group.add_argument(
        "--role", action="append", default=[], choices=list(ROLES), dest="roles",
        help="what this process does in the run; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--config", action="append", default=[], type=Path, metavar="FILE", dest="files",
        help="a TOML file; may be repeated, later files win",
    )  # fmt: skip
    group.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="assignments",
        help="set any key, or SECTION.TABLE.KEY of a table; may be repeated",
    )  # fmt: skip
    for flag, (_, metavar, text) in SHORTHANDS.items():
        group.add_argument(flag, metavar=metavar, dest=flag, help=text)


def resolve(arguments: argparse.Namespace) -> "Resolved":
    """Resolve the configuration from parsed flags, this process's environment and files.

    Raises NotReadyError: with every fault.
    """
    from node.config.settings import load

    return load(roles=arguments.roles, files=arguments.files, environ=os.environ, flags=_flags(arguments))


def _flags(arguments: argparse.Namespace) -> "list[Setting | ConfigError]":
    from node.config.setting_sources import read_flags

    given = {flag: getattr(arguments, flag) for flag in SHORTHANDS}
    shorthands = {flag: (SHORTHANDS[flag][0], text) for flag, text in given.items() if text is not None}
    return list(read_flags(shorthands, arguments.assignments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node config``."""
    add_configuration_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Print every key; then fail as the daemon would where the configuration is invalid.

    Raises NotReadyError: with every fault.
    """
    from node.config.settings import survey

    found = survey(roles=arguments.roles, files=arguments.files, environ=os.environ, flags=_flags(arguments))
    if arguments.json:
        print(to_json({row.name: _described(row) for row in found.rows}))
    else:
        for row in found.rows:
            print("\n".join(_lines(row)))
    if not arguments.roles:
        print("These are keys of every process; add --role for those of a role.", file=sys.stderr)
    if found.faults:
        raise NotReadyError(found.faults)
    return ExitCode.DRAINED


def _described(row: "SettingRow") -> dict[str, object]:
    told = {"value": row.value, "source": row.source, "default": row.default}
    told |= {"is_required": row.is_required, "bounds": row.bounds, "meaning": row.meaning}
    return told | ({"keys": {key.name: _described(key) for key in row.keys}} if row.keys else {})


def _lines(row: "SettingRow") -> Iterator[str]:
    """Yield a key with its value, who set it and the default, and below it bounds and meaning."""
    default = f"; default: {_text(row.default)}" if row.differs and not row.is_required else ""
    value = "is required" if row.is_missing else f"= {_text(row.value)}  ({row.source}{default})"
    yield f"{row.name} {value}"
    yield from _explained(row, indent="    ")
    for key in row.keys:
        value = "is required there" if key.is_required else f"= {_text(key.default)}  (default)"
        yield f"    {key.name} {value}"
        yield from _explained(key, indent="        ")


def _explained(row: "SettingRow", *, indent: str) -> Iterator[str]:
    bounds = f"{row.bounds[:1].upper()}{row.bounds[1:]}. " if row.bounds else ""
    text = f"{bounds}{row.meaning}"
    if text:
        yield textwrap.fill(text, 110, initial_indent=indent, subsequent_indent=indent)


def print_resolved(resolved: "Resolved") -> None:
    """Print every value with its source, a line each."""
    rows = [(row.name, _text(row.value), row.source) for row in resolved.values]
    name_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value, source in rows:
        print(f"{name:{name_width}}  {value:{value_width}}  {source}")


def _text(value: object) -> str:
    return "-" if value is None else to_json(value)
