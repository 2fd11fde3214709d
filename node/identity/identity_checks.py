"""Will this peer be let in? Its identity, judged before anyone is dialled.

A refused certificate looks like a dead hub from the client's side (UNAVAILABLE, "Socket closed") and would be
retried for ever.
"""

from pathlib import Path

from node.errors import ConfigError, StartupError
from node.identity.certificates import is_issued_by
from node.identity.clock_skew import ENROL_AGAIN, moment
from node.identity.identity_store import Identity, load_identity
from node.identity.run_description import RunDescription
from node.run import Role


def identity_on_disk(
    directory: Path, *, role: Role, run: RunDescription, node_id: str | None, now: float
) -> Identity | None:
    """Return the identity in ``directory``; None where this peer has to enrol first.

    Args:
        role: what the peer is started as.
        run: what it is configured for.
        node_id: ``node.node_id``; None where it is not set.
        now: Unix seconds.
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
    """Check that an identity will be let in, before the hub is asked; also before every dial.

    Raises:
        StartupError: it is of another run or role, expired, or not yet valid.
    """
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

    Raises:
        StartupError: it is not valid any more, or not yet.
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
