"""``heterorl-node init DIR``: everything a new run needs before its first process starts.

    DIR/run.json                 public: every machine of the run gets a copy
    DIR/coordinator/authority/   the run's certificate authority; stays with the coordinator
    DIR/coordinator/identity/    the coordinator's certificate
    DIR/coordinator/revoked      not made: node ids to shut out, one a line; edit it while the run goes on
    DIR/learner/                 the learner's certificate and signing.key; moves to the learner's machine
    DIR/operator/identity/       for `heterorl-node status`

DIR serves as ``node.state_dir`` of a run on one machine as it stands.
"""

import argparse
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from node.enrolment.authority import AUTHORITY_LIFETIME_S, Authority
from node.errors import ConfigError, ExitCode, StartupError
from node.identity.certificates import key_to_pem, new_key
from node.identity.files import cannot_make, make_private_directory
from node.identity.identity_store import Identity, make_identity, save_identity
from node.identity.peer import Peer, is_name
from node.identity.run_description import FILE_NAME, RunDescription
from node.identity.signatures import SigningKey
from node.rpc.address import check_host, join_address
from node.run import Role

AUTHORITY_DIRECTORY: Final = "authority"
IDENTITY_DIRECTORY: Final = "identity"
SIGNING_KEY_FILE: Final = "signing.key"

INITIAL_ROLES: Final = (Role.COORDINATOR, Role.LEARNER, Role.OPERATOR)
"""Who has an identity from the start; their node ids are their roles' names."""

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
  2. Copy {directory}/run.json to every machine (node.run_file).
  3. Let each sampler in with a token of its own, good for one hour and one use:
     heterorl-node token {directory} --role sampler --address {address} --out sampler.token
     where PORT is that of coordinator.enrolment_listen (7701 unless configured). Move the file to the
     sampler's machine and set node.token_file to it.
  4. Shut a node out, should its machine be lost or sold:
     heterorl-node revoke NODE --state-dir {directory}
"""


def init_run(directory: Path, *, run_id: str, hosts: Sequence[str], now: float) -> RunDescription:
    """Make a run: its authority, its signing key, and the identities that no token can give.

    Args:
        directory: made if missing.
        run_id: a DNS label.
        hosts: names and addresses of the coordinator, for its certificate.
        now: Unix seconds.
    Raises:
        StartupError: there is a run in ``directory``.
    """
    taken = [name for name in (FILE_NAME, *(role.value for role in Role)) if (directory / name).exists()]
    if taken:
        raise StartupError(
            f"{directory} holds a run already ({', '.join(taken)})",
            fix="Choose another directory; to make the run anew, delete this one first.",
        )
    make_private_directory(directory)
    authority = Authority.create(run_id, now=now)
    authority.save(directory / Role.COORDINATOR / AUTHORITY_DIRECTORY)
    for role in INITIAL_ROLES:
        identity = issue_identity(
            authority, Peer(run_id, role, role.value), hosts=hosts, now=now, lifetime_s=AUTHORITY_LIFETIME_S
        )
        save_identity(identity, directory / role / IDENTITY_DIRECTORY)
    signing_key = SigningKey.generate()
    make_private_directory(directory / Role.LEARNER)
    signing_key.save(directory / Role.LEARNER / SIGNING_KEY_FILE)
    run = RunDescription(run_id, authority.certificate_pem, signing_key.public_key)
    run.save(directory / FILE_NAME)
    return run


def issue_identity(
    authority: Authority, peer: Peer, *, hosts: Sequence[str] = (), now: float, lifetime_s: float
) -> Identity:
    """Make a key and its certificate in one place, for peers of the authority's own machine.

    Args:
        authority: of the peer's run.
        peer: whom to name.
        hosts: see ``Authority.issue``.
        now: Unix seconds.
        lifetime_s: from ``now``. Those of ``init`` live as long as the authority: nobody could renew the
            coordinator's, and whoever steals it has the authority's key too.
    """
    key = new_key()
    certificate_pem = authority.issue(peer, key.public_key(), hosts=hosts, now=now, lifetime_s=lifetime_s)
    return make_identity(key_to_pem(key), certificate_pem, authority.certificate_pem)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node init``."""
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="where the run is made; must not hold one"
    )
    parser.add_argument(
        "--run-id", metavar="ID", help="name of the run: 1-63 of [a-z0-9-]; default: run-<random>"
    )
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        dest="hosts",
        metavar="HOST",
        help="name or address the coordinator is reached at; may be repeated",
    )


def run(arguments: argparse.Namespace) -> int:
    """Make the run and say what to do next."""
    run_id = arguments.run_id or f"run-{secrets.token_hex(3)}"
    if not is_name(run_id):
        raise ConfigError(
            key="run id",
            value=run_id,
            source="--run-id",
            rule="a run id is 1-63 of a-z, 0-9 and -, and neither starts nor ends with -",
            fix="Choose another.",
        )
    for host in arguments.hosts:
        check_host(host, flag="--host")
    directory = arguments.directory
    try:
        init_run(directory, run_id=run_id, hosts=arguments.hosts, now=time.time())
    except OSError as error:
        raise cannot_make(directory, error, fix="Choose a directory that can be made and written.") from error
    address = join_address(arguments.hosts[0] if arguments.hosts else "HOST", "PORT")
    print(_NEXT_STEPS.format(run_id=run_id, directory=directory, address=address), end="")
    return ExitCode.DRAINED
