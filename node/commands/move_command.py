"""``heterorl-node move --to HOST:PORT``: tell all peers where the coordinator will be.

It writes ``DIR/coordinator/moved``, which a running coordinator hands on with its answers.
"""

import argparse
import time
from typing import Final

from node.commands.terminal import add_coordinator_state, coordinator_state
from node.enrolment.authority import Authority
from node.enrolment.init_run import AUTHORITY_DIRECTORY
from node.enrolment.move_notice import FILE_NAME, sign_move
from node.errors import COMMAND_LINE, ConfigError
from node.exit_code import ExitCode
from node.identity.files import write_public

EXAMPLE: Final = """\
  heterorl-node move --to hub2.example.net:7700 --state-dir runs/first
Peers hear of it with their next heartbeats and keep it. When `heterorl-node status` shows no peer silent,
stop the coordinator, copy DIR/coordinator to the new machine, start it there, and leave no copy that could be
started: two coordinators with one ledger would hand out the same prompts.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node move``."""
    parser.add_argument(
        "--to",
        metavar="HOST:PORT",
        action="append",
        required=True,
        help="the members port that peers will find it at; may be repeated",
    )
    add_coordinator_state(parser)


def run(arguments: argparse.Namespace) -> int:
    """Sign the notice and put it where the coordinator finds it."""
    state_dir, to = coordinator_state(arguments), tuple(dict.fromkeys(arguments.to))
    authority = Authority.load(state_dir / AUTHORITY_DIRECTORY)
    try:
        notice = sign_move(authority, to, now=time.time())
    except ValueError as error:
        raise ConfigError(
            key="--to",
            value=", ".join(to),
            source=COMMAND_LINE,
            rule=str(error),
            fix="Write host:port as peers dial it.",
        ) from error
    write_public(state_dir / FILE_NAME, notice)
    print(
        f"Peers are told with their next heartbeats that the coordinator will be at {', '.join(to)}. Then: "
        f"stop it, copy {state_dir} there, start it there, and never start this copy again."
    )
    return ExitCode.DRAINED
