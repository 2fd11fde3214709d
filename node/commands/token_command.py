"""``heterorl-node token DIR``: make a token that lets one peer enrol."""

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Final

from node.clock import moment
from node.commands.terminal import name, target
from node.enrolment.authority import Authority
from node.enrolment.init_run import AUTHORITY_DIRECTORY
from node.enrolment.tokens import ENROLLING_ROLES, MAX_LIFETIME_S, issue_token, write_token_file
from node.exit_code import ExitCode
from node.rpc.address import ENROLMENT_PORT
from node.run import Role

EXAMPLE: Final = """\
  heterorl-node token runs/first --role sampler --node-id sampler-1 --address hub.example.org:7701 \\
    --out sampler-1.token
"""

_UNIT_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node token``."""
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="the directory made by `heterorl-node init`"
    )
    parser.add_argument(
        "--role",
        required=True,
        choices=[role.value for role in ENROLLING_ROLES],
        help="what the peer will be",
    )
    parser.add_argument(
        "--node-id", type=name, metavar="ID", help="the only node id it admits; default: any not taken"
    )
    parser.add_argument(
        "--ttl",
        type=lifetime,
        default="2d",
        metavar="TIME",
        help="30m, 12h, 7d, which is the most; default: 2d",
    )
    parser.add_argument(
        "--address",
        required=True,
        type=target(ENROLMENT_PORT),
        metavar="HOST:PORT",
        help="where the new peer reaches the coordinator's enrolment port (coordinator.enrolment_listen, "
        f"{ENROLMENT_PORT} by default); the port is never guessed",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the token to FILE, readable by you only; default: standard output",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print or write the token; print what to do with it on standard error."""
    authority = Authority.load(arguments.directory / Role.COORDINATOR / AUTHORITY_DIRECTORY)
    now = time.time()
    token = issue_token(
        authority,
        role=Role(arguments.role),
        node_id=arguments.node_id,
        address=arguments.address,
        now=now,
        lifetime_s=arguments.ttl,
    )
    if arguments.out is None:
        print(token)
    else:
        write_token_file(arguments.out, token)
    kept = f"{arguments.out} has mode 600" if arguments.out else "Keep it in a file of mode 600 (--out FILE)"
    is_operator = arguments.role == Role.OPERATOR
    use = "name it with `status --token-file`" if is_operator else "set node.token_file to it"
    print(
        f"Valid for one {arguments.role} of run {authority.run_id} until {moment(now + arguments.ttl)} "
        f"(--ttl). It is a secret. {kept}; move it to the peer's machine and {use}.",
        file=sys.stderr,
    )
    return ExitCode.DRAINED


def lifetime(text: str) -> float:
    """Return the seconds in ``90s``, ``30m``, ``1h`` or ``2d``; the ``type`` of an argument."""
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    lifetime_s = float(match[1]) * _UNIT_S[match[2]] if match else 0.0
    if not 0 < lifetime_s <= MAX_LIFETIME_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number and s, m, h or d, at most 7d")
    return lifetime_s
