"""``heterorl-node pardon NODE``: ask again what a sampler failed, and hold nothing against it.

It leaves a file in ``DIR/coordinator``, which a running coordinator takes within a second; one that does not
run takes it when it starts.
"""

import argparse
from typing import Final

from node.commands.node_list import check_known
from node.commands.terminal import add_coordinator_state, coordinator_state, name
from node.coordinator.trust_upkeep import EVERYBODY, PARDONS, ask_pardon
from node.exit_code import ExitCode
from node.identity.files import cannot_make
from node.run import Role

EXAMPLE: Final = """\
  heterorl-node pardon sampler-3 --state-dir runs/first
  heterorl-node pardon all --state-dir runs/first
Prompts that were kept back on a sampler's word are leased again, its failures are forgotten and a quarantine
ends. To take back the word of a sampler and keep it out, revoke it instead.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node pardon``."""
    node_help = f"node ids, as `heterorl-node status` shows them, or {EVERYBODY}"
    parser.add_argument("nodes", nargs="+", type=name, metavar="NODE", help=node_help)
    add_coordinator_state(parser)


def run(arguments: argparse.Namespace) -> int:
    """Leave the names for the coordinator. Raises ConfigError: one is not a sampler's."""
    state = coordinator_state(arguments)
    check_known(state, [node for node in arguments.nodes if node != EVERYBODY], role=Role.SAMPLER)
    path = state / PARDONS
    try:
        ask_pardon(path, arguments.nodes)
    except OSError as error:
        raise cannot_make(path, error, fix="Check path and owner.") from error
    print(f"pardoned: {', '.join(arguments.nodes)}; a running coordinator acts on it within a second")
    return ExitCode.DRAINED
