"""A peer's first start: a name of its own, and a token turned into an identity."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final

from node.enrolment.enrolment import PATIENCE_S, enrol
from node.enrolment.token_file import how_to_get_a_token, read_token_file
from node.errors import StartupError
from node.identity.files import make_private_directory, write_public
from node.identity.identity_store import Identity
from node.identity.peer import is_name
from node.identity.run_description import RunDescription
from node.run import Role

NAME_FILE: Final = "node_id"


async def enrol_with_token(
    token_file: Path,
    *,
    run: RunDescription,
    role: Role,
    node_id: str | None,
    directory: Path,
    now: float,
    warn: Callable[[str], None],
    patience_s: float = PATIENCE_S,
) -> Identity:
    """Spend the token in a file, and keep the identity it gives.

    Args:
        token_file: see ``token_file``.
        run: the run to join.
        role: what the peer is.
        node_id: the wanted name; None: what the token says, else a random one, kept.
        directory: of the identity.
        now: Unix seconds.
        warn: told, in a sentence, if others may read the token.
        patience_s: as ``enrol``.
    Raises:
        StartupError: the token cannot be used or was refused, or the coordinator cannot be reached.
    """
    found = read_token_file(token_file, how_to_get_one=f"{how_to_get_a_token(role)}.")
    if found.exposure:
        warn(found.exposure)
    return await enrol(
        found.text,
        run=run,
        role=role,
        node_id=node_id or found.token.node_id or kept_name(directory.parent, role=role),
        directory=directory,
        now=now,
        patience_s=patience_s,
    )


def kept_name(state_dir: Path, *, role: Role) -> str:
    """Return the random name this peer took at its first start."""
    path = state_dir / NAME_FILE
    try:
        name = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        name = f"{role}-{secrets.token_hex(4)}"
        make_private_directory(state_dir)
        write_public(path, name.encode() + b"\n")
    if not is_name(name):
        raise StartupError(f"{path} holds {name[:100]!r}, which is no node id", fix="Delete the file.")
    return name
