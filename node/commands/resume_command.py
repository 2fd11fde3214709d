"""``heterorl-node resume``: end a pause. Drained samplers stay drained."""

import argparse
from typing import Final

from node.commands.node_list import NodeList
from node.commands.terminal import add_coordinator_state, coordinator_state
from node.coordinator.held_back import EVERYBODY, FILE_NAME
from node.exit_code import ExitCode

EXAMPLE: Final = """\
  heterorl-node resume --state-dir runs/first
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node resume``."""
    add_coordinator_state(parser)


def run(arguments: argparse.Namespace) -> int:
    """End the pause; a running coordinator reads that by itself."""
    held_back = NodeList(coordinator_state(arguments) / FILE_NAME)
    if EVERYBODY not in held_back.remarks:
        print("not paused")
        return ExitCode.DRAINED
    held_back.remove([EVERYBODY], otherwise="it is not paused")
    print("resumed: samplers are leased to again, within a second")
    return ExitCode.DRAINED
