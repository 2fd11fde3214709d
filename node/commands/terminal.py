"""Shared by commands: arguments, messages for wrong ones, tables."""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from node.errors import ConfigError, StartupError
from node.identity.peer import is_name
from node.run import Role

_PIPE_COLUMNS = 1 << 16
"""A pipe has no width, and its reader wants whole lines."""


def add_coordinator_state(parser: argparse.ArgumentParser) -> None:
    """Declare ``--state-dir`` of a command that runs where the coordinator does."""
    parser.add_argument(
        "--state-dir", type=Path, required=True, metavar="DIR",
        help="the coordinator's node.state_dir, made by `heterorl-node init`; the command runs where it is",
    )  # fmt: skip


def coordinator_state(arguments: argparse.Namespace) -> Path:
    """Return the coordinator's directory below ``--state-dir``; a StartupError if there is none."""
    directory: Path = arguments.state_dir / Role.COORDINATOR
    if not directory.is_dir():
        raise StartupError(
            f"There is no coordinator's state in {arguments.state_dir}",
            fix="Run this where the coordinator runs, with its node.state_dir as --state-dir.",
        )
    return directory


def check_node_id(node_id: str, *, argument: str = "NODE") -> None:
    """Raise a ConfigError for what is not a node id."""
    if not is_name(node_id):
        raise bad_argument(argument, node_id, "a node id is 1-63 of a-z, 0-9 and -")


def bad_argument(argument: str, value: object, rule: str, *, fix: str = "Correct it.") -> ConfigError:
    """Return the error for an argument that breaks a rule."""
    return ConfigError(key=argument, value=value, source="the command line", rule=rule, fix=fix)


def table(*headings: str, spaces: int = 2, right: bool = False) -> Table:
    """Return a table without lines; further columns may be added."""
    made = Table(box=None, pad_edge=False, padding=(0, spaces, 0, 0), header_style="bold")
    for heading in headings:
        made.add_column(heading, justify="right" if right else "left", no_wrap=True)
    return made


def console() -> Console:
    """Return standard output, of which a pipe gets whole lines."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
