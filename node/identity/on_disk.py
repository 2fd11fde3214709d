"""The identity a role has on its disk, judged before anyone is dialled."""

from pathlib import Path

from node.errors import ConfigError, StartupError
from node.identity.identity_store import Identity, check_own, load_identity
from node.identity.run_description import RunDescription
from node.run import Role


def identity_on_disk(
    directory: Path, *, role: Role, run: RunDescription, node_id: str | None, now: float
) -> Identity | None:
    """Return the identity in ``directory``; None where this peer has to enrol first.

    Args:
        directory: of the identity.
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
