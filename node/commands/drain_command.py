"""``heterorl-node drain NODE``: give a sampler no more leases, so that it can be stopped without loss.

It edits ``DIR/coordinator/held_back``; see ``node_list``.
"""

import argparse
from typing import Final

from node.commands.node_list import (
    NodeList,
    add_list_arguments,
    bad_node,
    check_known,
    check_named,
    check_none_named,
)
from node.commands.terminal import coordinator_state
from node.coordinator.held_back import EVERYBODY, FILE_NAME
from node.exit_code import ExitCode
from node.run import Role

EXAMPLE: Final = """\
  heterorl-node drain sampler-3 --state-dir runs/first --because "moves to another rack"
  heterorl-node status --state-dir runs/first --coordinator 127.0.0.1:7700 --name sampler-3
  heterorl-node drain --undo sampler-3 --state-dir runs/first
It finishes what it holds. Once the status shows no leases of it, it may be stopped.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node drain``."""
    add_list_arguments(parser, undo="lease to them again", listed="show who is drained, and why")


def run(arguments: argparse.Namespace) -> int:
    """Change or print the list; a running coordinator reads a change by itself."""
    state, nodes = coordinator_state(arguments), arguments.nodes
    held_back = NodeList(state / FILE_NAME)
    if arguments.is_list:
        check_none_named(nodes)
        held_back.show(as_json=arguments.json, nobody="no sampler is drained", besides=EVERYBODY)
        return ExitCode.DRAINED
    check_named(nodes)
    if EVERYBODY in nodes:
        raise bad_node(EVERYBODY, "everybody is a pause", fix="Use heterorl-node pause, or resume.")
    if arguments.undo:
        held_back.remove(nodes, otherwise="it is not drained", besides=EVERYBODY)
        print(f"{', '.join(nodes)}: leased to again, within a second.")
        return ExitCode.DRAINED
    in_advance = f"To name one in advance, write it into {state / FILE_NAME}."
    check_known(state, nodes, role=Role.SAMPLER, fix=in_advance)
    held_back.add(nodes, because=arguments.because)
    undo = f"heterorl-node drain --undo {' '.join(nodes)} --state-dir {arguments.state_dir}"
    print(f"{', '.join(nodes)}: no more leases from now on; what is held is finished.\nTo undo: {undo}")
    return ExitCode.DRAINED
