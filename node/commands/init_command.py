"""``heterorl-node init DIR``: make a new run and print what to do next."""

import argparse
import secrets
import shlex
import time
from pathlib import Path
from typing import Final

from node.commands.terminal import name
from node.enrolment.init_run import init_run
from node.exit_code import ExitCode
from node.identity.files import cannot_make
from node.rpc.address import ENROLMENT_PORT, MEMBERS_PORT, is_host, join_address

EXAMPLE: Final = """\
  heterorl-node init runs/first --run-id first --host hub.example.org
"""

_NEXT_STEPS: Final = """\
Made run {run_id} in {directory}

Coordinator and learner on this machine, with their sections [coordinator] and [learner] in run.toml
(`heterorl-node config --role coordinator --role learner` shows every key):
  heterorl-node --role coordinator --role learner --config run.toml --state-dir {directory} \\
    --coordinator 127.0.0.1:{members}

The learner on another machine, in place of that:
  1. Move {directory}/learner and copy {directory}/run.json
     into one directory there, which is the learner's --state-dir. Leave no copy of learner/ here:
     learner/signing.key signs every policy version, and nothing else needs it.
  2. Start the coordinator here, and let others reach it:
     heterorl-node --role coordinator --config run.toml --state-dir {directory} \\
       --set coordinator.listen=0.0.0.0:{members} --set coordinator.enrolment_listen=0.0.0.0:{enrolment}

Samplers, on any machine:
  1. Name the model directory at the coordinator (coordinator.model_dir), for samplers that have none.
  2. Make a token for each sampler, or one for several (--uses), which lasts two days. The address is that of
     coordinator.enrolment_listen as the sampler reaches it:
     heterorl-node token {directory} --role sampler --address {address}
  3. On the sampler's machine: heterorl-node join TOKEN

Shut a node out if its machine is lost or sold:
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
    steps = _NEXT_STEPS.format(
        run_id=run_id,
        directory=shlex.quote(str(directory)),
        address=join_address(arguments.hosts[0] if arguments.hosts else "HOST", ENROLMENT_PORT),
        members=MEMBERS_PORT,
        enrolment=ENROLMENT_PORT,
    )
    print(steps, end="")
    return ExitCode.DRAINED


def host(text: str) -> str:
    """Return a host without a port, an argument's ``type``."""
    if not is_host(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a name or address alone, such as hub.example.org or ::1; the port belongs to "
            "coordinator.listen"
        )
    return text
