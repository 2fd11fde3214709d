"""Everything a new run needs before its first process starts, made by ``heterorl-node init DIR``.

    DIR/run.json                 public: every machine of the run gets a copy
    DIR/coordinator/authority/   the run's certificate authority; stays with the coordinator
    DIR/coordinator/identity/    the coordinator's certificate
    DIR/coordinator/revoked      not made: node ids to shut out, one a line; edit it while the run goes on
    DIR/learner/                 the learner's certificate and signing.key; moves to the learner's machine
    DIR/operator/identity/       for `heterorl-node status`

DIR serves as ``node.state_dir`` of a run on one machine as it stands.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from node.enrolment.authority import AUTHORITY_LIFETIME_S, Authority
from node.errors import StartupError
from node.identity.certificates import key_to_pem, new_key
from node.identity.files import make_private_directory
from node.identity.identity_store import IDENTITY_DIRECTORY as IDENTITY_DIRECTORY
from node.identity.identity_store import Identity, make_identity, save_identity
from node.identity.peer import Peer
from node.identity.run_description import FILE_NAME, RunDescription
from node.identity.signatures import SigningKey
from node.values.roles import Role

AUTHORITY_DIRECTORY: Final = "authority"
SIGNING_KEY_FILE: Final = "signing.key"

INITIAL_ROLES: Final = (Role.COORDINATOR, Role.LEARNER, Role.OPERATOR)
"""Who has an identity from the start; their node ids are their roles' names."""


def init_run(directory: Path, *, run_id: str, hosts: Sequence[str], now: float) -> RunDescription:
    """Make a run: its authority, its signing key, and the first identities.

    ``hosts`` are for the coordinator's certificate. Raises StartupError: there is a run in ``directory``.
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
            authority,
            Peer(run_id, role, role.value),
            hosts=hosts if role is Role.COORDINATOR else (),
            now=now,
            lifetime_s=AUTHORITY_LIFETIME_S,
        )
        save_identity(identity, directory / role / IDENTITY_DIRECTORY)
    signing_key = SigningKey.generate()
    make_private_directory(directory / Role.LEARNER)
    signing_key.save(directory / Role.LEARNER / SIGNING_KEY_FILE)
    run = RunDescription(
        run_id=run_id,
        ca_certificate_pem=authority.certificate_pem,
        learner_public_key=signing_key.public_key,
    )
    run.save(directory / FILE_NAME)
    return run


def issue_identity(
    authority: Authority, peer: Peer, *, hosts: Sequence[str] = (), now: float, lifetime_s: float
) -> Identity:
    """Make a key and its certificate in one place, for peers of the authority's own machine.

    Those of ``init`` live as long as the authority: the coordinator's is never renewed, and whoever steals it
    has the authority's key too.
    """
    key = new_key()
    certificate_pem = authority.issue(peer, key.public_key(), hosts=hosts, now=now, lifetime_s=lifetime_s)
    return make_identity(key_to_pem(key), certificate_pem, authority.certificate_pem)
