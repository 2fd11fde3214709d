"""``heterorl-node drain NODE``: give a sampler no more leases, so that it can be stopped without loss.

It edits ``DIR/coordinator/held_back``; see ``node_list``.
"""

import argparse
from typing import Final

from node.commands.node_list import NodeList, bad_node, check_named
from node.commands.terminal import add_coordinator_state, coordinator_state, name
from node.coordinator.held_back import EVERYBODY, FILE_NAME
from node.exit_code import ExitCode

EXAMPLE: Final = """\
  heterorl-node drain sampler-3 --state-dir runs/first --because "moves to another rack"
  heterorl-node status --state-dir runs/first --coordinator 127.0.0.1:7700 --name sampler-3
  heterorl-node drain --undo sampler-3 --state-dir runs/first
It finishes what it holds. Once the status shows no leases of it, it may be stopped.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node drain``."""
    parser.add_argument(
        "nodes", nargs="*", type=name, metavar="NODE", help="samplers, as `heterorl-node status` shows them"
    )
    add_coordinator_state(parser)
    parser.add_argument("--because", metavar="TEXT", default="", help="a remark, which the status shows")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--undo", action="store_true", help="lease to them again")
    what.add_argument("--list", action="store_true", dest="is_list", help="show who is drained, and why")


def run(arguments: argparse.Namespace) -> int:
    """Change or print the list; a running coordinator reads a change by itself."""
    held_back, nodes = NodeList(coordinator_state(arguments) / FILE_NAME), arguments.nodes
    if arguments.is_list:
        print("\n".join(held_back.lines(besides=EVERYBODY)) or "no sampler is drained")
        return ExitCode.DRAINED
    check_named(nodes)
    if EVERYBODY in nodes:
        raise bad_node(EVERYBODY, "everybody is a pause", fix="Use heterorl-node pause, or resume.")
    if arguments.undo:
        held_back.remove(nodes, otherwise="it is not drained")
        print(f"{', '.join(nodes)}: leased to again, within a second.")
        return ExitCode.DRAINED
    for node in nodes:
        held_back.check_known(node)
    held_back.add(nodes, because=arguments.because)
    undo = f"heterorl-node drain --undo {' '.join(nodes)} --state-dir {arguments.state_dir}"
    print(f"{', '.join(nodes)}: no more leases from now on; what is held is finished.\nTo undo: {undo}")
    return ExitCode.DRAINED
