"""Shared by commands: arguments and their types, tables."""

import argparse
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from node.errors import StartupError
from node.identity.peer import is_name
from node.rpc.address import is_host, join_address, split_target, split_targets
from node.values.roles import Role

_PIPE_COLUMNS = 1 << 16
"""A pipe has no width, and its reader wants whole lines."""


def add_coordinator_state(parser: argparse._ActionsContainer, *, required: bool = True) -> None:
    """Declare ``--state-dir`` of a command that runs where the coordinator does."""
    parser.add_argument(
        "--state-dir", type=Path, required=required, metavar="DIR",
        help="the coordinator's node.state_dir, made by `heterorl-node init`; the command runs where it is",
    )  # fmt: skip


def coordinator_state(arguments: argparse.Namespace) -> Path:
    """Return the coordinator's directory below ``--state-dir``; a StartupError if there is none."""
    return state_of(Role.COORDINATOR, arguments)


def state_of(role: Role, arguments: argparse.Namespace) -> Path:
    """Return a role's directory below ``--state-dir``; a StartupError if there is none."""
    directory: Path = arguments.state_dir / role
    if not directory.is_dir():
        given: Path = arguments.state_dir
        fix = f"Run this where the {role} runs, with its node.state_dir as --state-dir."
        if given.name == role and given.is_dir():
            fix = f"--state-dir is the directory above, {given.parent}."
        missing = "" if given.exists() else ", which does not exist"
        raise StartupError(f"There is no {role}'s state in {given}{missing}", fix=fix)
    return directory


def name(text: str) -> str:
    """Return the id of a node or run, an argument's ``type``."""
    if not is_name(text):
        raise ArgumentTypeError(f"{text!r} is not an id: 1-63 of a-z, 0-9 and -, with no - at either end")
    return text


def target(example_port: int, *, or_several: bool = False) -> Callable[[str], str]:
    """Return the ``type`` of an argument that is an address to dial; ``example_port`` is for the message.

    ``or_several``: with commas between, of a run with several coordinators.
    """

    def check(text: str) -> str:
        try:
            (split_targets if or_several else split_target)(text)
        except ValueError as error:
            example = text.partition(":")[0]
            example = join_address(example if is_host(example) else "HOST", example_port)
            raise ArgumentTypeError(f"{error}. For example: {example}") from error
        return text

    return check


def table(*headings: str, spaces: int = 2, right: bool = False) -> Table:
    """Return a table without lines; further columns may be added."""
    made = Table(box=None, pad_edge=False, padding=(0, spaces, 0, 0), header_style="bold")
    for heading in headings:
        made.add_column(heading, justify="right" if right else "left", no_wrap=True)
    return made


def console() -> Console:
    """Return standard output, of which a pipe gets whole lines."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS)


def printable(text: str) -> str:
    """Return a text of a peer without what could reach the terminal as a command."""
    return "".join(filter(str.isprintable, text))
