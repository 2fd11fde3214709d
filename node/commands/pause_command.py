"""``heterorl-node pause``: lease nothing more to anybody until ``heterorl-node resume``.

It edits ``DIR/coordinator/held_back``; see ``node_list``.
"""

import argparse
from typing import Final

from node.commands.node_list import NodeList
from node.commands.terminal import add_coordinator_state, coordinator_state
from node.coordinator.held_back import EVERYBODY, FILE_NAME
from node.exit_code import ExitCode

EXAMPLE: Final = """\
  heterorl-node pause --state-dir runs/first --because "the judge is down"
  heterorl-node resume --state-dir runs/first
Groups that are begun are finished, submitted and, as far as they fill batches, trained on. The pause survives
restarts; `heterorl-node status` says since when.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node pause``."""
    add_coordinator_state(parser)
    parser.add_argument("--because", metavar="TEXT", default="", help="a remark, which the status shows")


def run(arguments: argparse.Namespace) -> int:
    """Pause the run; a running coordinator reads that by itself."""
    held_back = NodeList(coordinator_state(arguments) / FILE_NAME)
    if EVERYBODY in held_back.remarks:
        print(f"paused already: {held_back.remarks[EVERYBODY]}")
        return ExitCode.DRAINED
    held_back.add([EVERYBODY], because=arguments.because)
    print(f"paused. To lease again: heterorl-node resume --state-dir {arguments.state_dir}")
    return ExitCode.DRAINED
