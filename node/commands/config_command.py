"""``heterorl-node config``: print every value a process would run with and its source; start nothing.

The daemon shares the configuration flags of this module.
"""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from node.exit_code import ExitCode
from node.process.role_context import ROLE_MODULES

if TYPE_CHECKING:
    from node.config.settings import Resolved

EXAMPLE: Final = """\
  heterorl-node config --role sampler --config sampler.toml --set sampler.threads=4
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
        "--role", action="append", default=[], choices=list(ROLE_MODULES), dest="roles",
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
    from node.config.setting_sources import read_flags
    from node.config.settings import load

    given = {flag: getattr(arguments, flag) for flag in SHORTHANDS}
    shorthands = {flag: (SHORTHANDS[flag][0], text) for flag, text in given.items() if text is not None}
    flags = read_flags(shorthands, arguments.assignments)
    return load(roles=arguments.roles, files=arguments.files, environ=os.environ, flags=flags)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node config``."""
    add_configuration_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print the configuration; fail as the daemon would where it is invalid."""
    print_resolved(resolve(arguments), as_json=arguments.json)
    return ExitCode.DRAINED


def print_resolved(resolved: "Resolved", *, as_json: bool) -> None:
    """Print every value with its source."""
    from node.telemetry.logging import to_json

    if as_json:
        print(to_json({v.name: {"value": v.value, "source": v.source} for v in resolved.values}))
        return
    rows = [(v.name, "-" if v.value is None else to_json(v.value), v.source) for v in resolved.values]
    name_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value, source in rows:
        print(f"{name:{name_width}}  {value:{value_width}}  {source}")
