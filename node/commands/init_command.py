"""``heterorl-node init DIR``: make a new run and print what to do next."""

import argparse
import secrets
import time
from pathlib import Path
from typing import Final

from node.commands.terminal import name
from node.enrolment.init_run import init_run
from node.exit_code import ExitCode
from node.identity.files import cannot_make
from node.rpc.address import is_host, join_address

EXAMPLE: Final = """\
  heterorl-node init runs/first --run-id first --host hub.example.org
"""

_NEXT_STEPS: Final = """\
Made run {run_id} in {directory}

On one machine:
  heterorl-node --role coordinator --role learner --config ... \\
    --set node.state_dir={directory} --set node.run_file={directory}/run.json

On several:
  1. Move {directory}/learner to the learner's machine (its state_dir) and delete it here:
     learner/signing.key signs every policy version, and nothing else needs it.
  2. Name the model directory at the coordinator (coordinator.model_dir), for samplers that have none.
  3. Make a token for each sampler, or one for several (--uses), while it lasts (two days):
     heterorl-node token {directory} --role sampler --address {address}
     where PORT is that of coordinator.enrolment_listen (7701 unless configured). Then, on its machine:
     heterorl-node join TOKEN
  4. Shut a node out if its machine is lost or sold:
     heterorl-node revoke NODE --state-dir {directory}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node init``."""
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="where the run is made; must not hold one"
    )
    parser.add_argument(
        "--run-id", type=name, metavar="ID", help="name of the run: 1-63 of [a-z0-9-]; default: run-<random>"
    )
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        type=host,
        dest="hosts",
        metavar="HOST",
        help="name or address the coordinator is reached at; may be repeated",
    )


def run(arguments: argparse.Namespace) -> int:
    """Make the run and print what to do next."""
    run_id = arguments.run_id or f"run-{secrets.token_hex(3)}"
    directory = arguments.directory
    try:
        init_run(directory, run_id=run_id, hosts=arguments.hosts, now=time.time())
    except OSError as error:
        raise cannot_make(directory, error, fix="Choose a directory that can be made and written.") from error
    address = join_address(arguments.hosts[0] if arguments.hosts else "HOST", "PORT")
    print(_NEXT_STEPS.format(run_id=run_id, directory=directory, address=address), end="")
    return ExitCode.DRAINED


def host(text: str) -> str:
    """Return a host without a port, an argument's ``type``."""
    if not is_host(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a name or address alone, such as hub.example.org or ::1; the port belongs to "
            "coordinator.listen"
        )
    return text
