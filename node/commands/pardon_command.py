"""``heterorl-node pardon NODE``: ask again what a sampler failed, and hold nothing against it.

It leaves a file in ``DIR/coordinator``, which a running coordinator takes within a second; one that does not
run takes it when it starts.
"""

import argparse
from pathlib import Path
from typing import Final

from node.coordinator.trust_upkeep import EVERYBODY, PARDONS, ask_pardon
from node.errors import ConfigError, StartupError
from node.exit_code import ExitCode
from node.identity.files import cannot_make
from node.identity.peer import is_name
from node.run import Role

EXAMPLE: Final = """\
  heterorl-node pardon sampler-3 --state-dir runs/first
  heterorl-node pardon all --state-dir runs/first
Prompts that were kept back on a sampler's word are leased again, its failures are forgotten and a quarantine
ends. To take back the word of a sampler and keep it out, revoke it instead.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node pardon``."""
    parser.add_argument(
        "nodes",
        nargs="+",
        metavar="NODE",
        help=f"node ids, as `heterorl-node status` shows them, or {EVERYBODY}",
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        required=True,
        metavar="DIR",
        help="the coordinator's state directory; the command runs where it is",
    )


def run(arguments: argparse.Namespace) -> int:
    """Leave the names for the coordinator."""
    state_dir = arguments.state_dir / Role.COORDINATOR
    if not state_dir.is_dir():
        raise StartupError(
            f"There is no coordinator's state in {arguments.state_dir}",
            fix="Run this where the coordinator runs, with its node.state_dir as --state-dir.",
        )
    for node in arguments.nodes:
        if not is_name(node):
            rule, fix = "a node id is 1-63 of a-z, 0-9 and -", "Correct it."
            raise ConfigError(key="NODE", value=node, source="the command line", rule=rule, fix=fix)
    path = state_dir / PARDONS
    try:
        ask_pardon(path, arguments.nodes)
    except OSError as error:
        raise cannot_make(path, error, fix="Check path and owner.") from error
    print(f"pardoned: {', '.join(arguments.nodes)}; a running coordinator acts on it within a second")
    return ExitCode.DRAINED
