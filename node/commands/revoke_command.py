"""``heterorl-node revoke NODE``: shut a node out of the run, let it in again, list the nodes shut out.

It edits ``DIR/coordinator/revoked``; see ``node_list``.
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
from node.exit_code import ExitCode
from node.identity.revocation import FILE_NAME
from node.run import Role

EXAMPLE: Final = """\
  heterorl-node revoke sampler-3 --state-dir runs/first --because "its disk was sold"
  heterorl-node revoke --list --state-dir runs/first
  heterorl-node revoke --undo sampler-3 --state-dir runs/first
A running coordinator ends the node's streams within 5 s, and its relays follow; nothing is restarted.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node revoke``."""
    add_list_arguments(parser, undo="let the nodes in again", listed="show who is shut out, and why")


def run(arguments: argparse.Namespace) -> int:
    """Change or print the list; a running coordinator reads a change by itself."""
    state, nodes = coordinator_state(arguments), arguments.nodes
    revoked = NodeList(state / FILE_NAME)
    if arguments.is_list:
        check_none_named(nodes)
        revoked.show(as_json=arguments.json, nobody="no node is shut out")
        return ExitCode.DRAINED
    check_named(nodes)
    if arguments.undo:
        revoked.remove(nodes, otherwise="it is not shut out")
        print(f"{', '.join(nodes)} may come in again, with the certificate from before or a new token.")
        return ExitCode.DRAINED
    if Role.COORDINATOR in nodes:
        raise bad_node(Role.COORDINATOR, "the coordinator keeps this list and cannot be shut out by it")
    check_known(state, nodes, fix=f"To name one in advance, write it into {state / FILE_NAME}.")
    revoked.add(nodes, because=arguments.because)
    undo = f"heterorl-node revoke --undo {' '.join(nodes)} --state-dir {arguments.state_dir}"
    print(
        f"{', '.join(nodes)} {'is' if len(nodes) == 1 else 'are'} shut out: a running coordinator ends "
        "their streams within 5 s, relays follow at their next heartbeat, and no token lets the name in "
        f"again.\nTo undo: {undo}"
    )
    return ExitCode.DRAINED
