"""A peer's own identity on its disk: a key, the certificate that names it, the authority behind it.

Also whether it will be let in. A directory holds a whole identity exactly when it holds a certificate: that
file is written last.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric import ec

from node.errors import ConfigError, RefusedError, StartupError
from node.identity.certificates import (
    is_issued_by,
    key_to_pem,
    new_key,
    peer_in,
    read_certificate,
    read_curve_key,
)
from node.identity.files import cannot_read, make_private_directory, read_secret, write_public, write_secret
from node.identity.peer import Peer
from node.identity.run_description import RunDescription
from node.system.clock import moment
from node.values.roles import Role

IDENTITY_DIRECTORY: Final = "identity"
"""Below a role's directory in node.state_dir."""

KEY_FILE: Final = "key.pem"
CERTIFICATE_FILE: Final = "certificate.pem"
CA_FILE: Final = "ca.pem"

ENROL_AGAIN: Final = (
    "Make a token where the coordinator runs (`heterorl-node token DIR --role {role} --address HOST:PORT "
    "--out FILE`), set node.token_file to it, move the old identity directory away, and start again."
)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this peer is, and what proves it."""

    node_id: str
    role: Role
    run_id: str
    key_pem: bytes = field(repr=False)
    certificate_pem: bytes
    ca_pem: bytes
    not_before_s: float
    """Unix seconds."""
    not_after_s: float
    """Unix seconds."""

    @property
    def peer(self) -> Peer:
        return Peer(self.run_id, self.role, self.node_id)

    @property
    def current(self) -> "Identity":
        """Itself: nothing renews it, as it does an ``OwnIdentity``."""
        return self


def make_identity(key_pem: bytes, certificate_pem: bytes, ca_pem: bytes) -> Identity:
    """Put an identity together. Raises ValueError, RefusedError: a part is damaged or does not belong."""
    certificate = read_certificate(certificate_pem)
    read_certificate(ca_pem)
    if read_curve_key(key_pem).public_key() != certificate.public_key():
        raise ValueError("key and certificate do not belong together")
    peer = peer_in(certificate)
    return Identity(
        node_id=peer.node_id,
        role=peer.role,
        run_id=peer.run_id,
        key_pem=key_pem,
        certificate_pem=certificate_pem,
        ca_pem=ca_pem,
        not_before_s=certificate.not_valid_before_utc.timestamp(),
        not_after_s=certificate.not_valid_after_utc.timestamp(),
    )


def load_identity(directory: Path) -> Identity | None:
    """Read an identity; None where the peer has not enrolled yet. Raises StartupError: it is damaged."""
    try:
        certificate_pem = (directory / CERTIFICATE_FILE).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise cannot_read(directory / CERTIFICATE_FILE, error, fix="Check path and owner.") from error
    key_pem = read_secret(directory / KEY_FILE)
    try:
        ca_pem = (directory / CA_FILE).read_bytes()
        identity = make_identity(key_pem, certificate_pem, ca_pem)
        if not (is_issued_by(ca_pem, ca_pem) and is_issued_by(certificate_pem, ca_pem)):
            raise ValueError(f"{CERTIFICATE_FILE} or {CA_FILE} does not have the authority's signature")
        return identity
    except OSError as error:
        fix = "Restore the directory from a copy, or move it away and enrol with a new token."
        raise cannot_read(directory / CA_FILE, error, fix=fix) from error
    except (ValueError, RefusedError) as error:
        raise StartupError(
            f"The identity in {directory} is damaged: {error}",
            fix="Restore it, or move it away and enrol with a new token.",
        ) from error


def save_identity(identity: Identity, directory: Path) -> None:
    """Write an identity; the certificate last, so that a directory holds a whole identity or none."""
    make_private_directory(directory)
    write_secret(directory / KEY_FILE, identity.key_pem)
    write_public(directory / CA_FILE, identity.ca_pem)
    write_public(directory / CERTIFICATE_FILE, identity.certificate_pem)


def load_or_make_key(directory: Path) -> ec.EllipticCurvePrivateKey:
    """Return the key of an identity to be; kept from the first call on, so that enrolling can be repeated."""
    path = directory / KEY_FILE
    if not path.exists():
        key = new_key()
        make_private_directory(directory)
        write_secret(path, key_to_pem(key))
        return key
    try:
        return read_curve_key(read_secret(path))
    except ValueError as error:
        raise StartupError(f"{path} is damaged: {error}", fix="Move it away and start again.") from error


def expiries(identity: Identity) -> tuple[tuple[str, float], ...]:
    """Return name and end (Unix seconds) of each certificate that an identity stands on."""
    authority = read_certificate(identity.ca_pem)
    return (
        (identity.role.value, identity.not_after_s),
        ("authority", authority.not_valid_after_utc.timestamp()),
    )


def identity_on_disk(
    directory: Path, *, role: Role, run: RunDescription, node_id: str | None, now: float
) -> Identity | None:
    """Return the identity in ``directory``; None where this peer has to enrol first.

    It is judged before anyone is dialled: a refused certificate looks like a dead hub from the client's side
    (UNAVAILABLE, "Socket closed") and would be retried for ever.

    Raises:
        StartupError: it will not be let in, or is a coordinator's and missing: nobody could enrol that.
        ConfigError: ``node.node_id`` is not the name in it.
    """
    identity = load_identity(directory)
    if identity is None:
        if role is Role.COORDINATOR:
            raise StartupError(
                f"There is no coordinator's certificate in {directory}",
                fix="Set node.state_dir to the directory made by `heterorl-node init DIR`.",
            )
        return None
    check_own(identity, run, role, now)
    if node_id not in (None, identity.node_id) and role is not Role.COORDINATOR:
        raise ConfigError(
            key="node.node_id",
            value=node_id,
            source="the configuration",
            rule=f"the certificate in {directory} names {identity.node_id}",
            fix="Leave node.node_id out, or move the directory away and enrol with a new token.",
        )
    return identity


def check_own(identity: Identity, run: RunDescription, role: Role, now: float) -> None:
    """Check that an identity will be let in, before the hub is asked. Raises StartupError: it will not."""
    enrol_again = ENROL_AGAIN.format(role=role)
    if identity.run_id != run.run_id:
        raise StartupError(
            f"This node's certificate is for run {identity.run_id}, the run file is of {run.run_id}",
            fix="Point node.state_dir and node.run_file at the same run.",
        )
    if not is_issued_by(identity.certificate_pem, run.ca_certificate_pem):
        raise StartupError(
            f"This node's certificate was issued by another authority than that of run {run.run_id}: "
            "a run of the same name was made anew",
            fix=enrol_again,
        )
    if identity.role != role:
        raise StartupError(
            f"This node's certificate is for role {identity.role}, but it is started as {role}",
            fix=f"Start it with --role {identity.role}, or enrol it anew. {enrol_again}",
        )
    check_dates(identity, now)


def check_dates(identity: Identity, now: float) -> None:
    """Check that an identity's certificate is valid at ``now``, Unix seconds.

    Raises StartupError: it is not valid any more, or not yet.
    """
    if now >= identity.not_after_s:
        raise StartupError(
            f"The certificate of {identity.node_id} expired at {moment(identity.not_after_s)}, "
            f"and this machine's clock says {moment(now)}",
            fix=f"If the clock is wrong, set it. If not: {ENROL_AGAIN.format(role=identity.role)}",
        )
    if now < identity.not_before_s:
        raise StartupError(
            f"The certificate of {identity.node_id} is valid from {moment(identity.not_before_s)}, "
            f"and this machine's clock says {moment(now)}",
            fix="Set the clock. If it is right, the coordinator's was ahead when it made the certificate: "
            "set that, and enrol again with a new token.",
        )
