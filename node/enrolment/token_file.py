"""A token in a file: written for its owner only, and refused if others may have replaced it.

    0600, 0400    the owner                                                      taken
    0440          root's, opened to this process's group: a mounted secret       taken
    0640, 0644    others may read it: ``> file`` under umask 022, or a Secret    taken, with a warning
    0620, 0666    others may write it                                            refused

Kubernetes mounts Secrets that others may read by default, so these are taken. Nothing mounts a secret that
others may write, and a token that anyone may replace says nothing about who is let in.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.enrolment.tokens import Token
from node.errors import RefusedError, StartupError
from node.identity.certificates import is_same_certificate
from node.identity.files import cannot_make, obstacle, write_secret
from node.identity.run_description import RunDescription
from node.limits import TOKEN_BYTES
from node.rpc.address import split_target
from node.run import Role

_READABLE: Final = stat.S_IRGRP | stat.S_IROTH
_WRITABLE: Final = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A token as it lies on disk."""

    text: str
    token: Token
    exposure: str
    """Who else may read it, for a warning; empty where nobody may."""


def read_token_file(path: Path, *, how_to_get_one: str) -> TokenFile:
    """Read a token.

    Args:
        path: of the file; may be a link, as in a mounted Secret: the file behind it counts.
        how_to_get_one: the fix, should there be no good token.
    Raises:
        StartupError: it is not there, is no token, or may be written by others.
    """
    try:
        # The descriptor is checked, not the path, so that the file checked is the file read.
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            mode = stat.S_IMODE(status.st_mode)
            if mode & _WRITABLE:
                raise StartupError(
                    f"The token in {path} may be replaced by others: the file has mode {mode:o}",
                    fix=f"Run: chmod 600 {path}. If others use this machine, make a new token: "
                    "they may have read this one.",
                )
            text = file.read(TOKEN_BYTES + 1).decode("ascii")
        token = Token.parse(text)
    except OSError as error:
        found = obstacle(path, error)
        raise StartupError(
            f"The token in {path} cannot be used: {found.what}", fix=found.fix or how_to_get_one
        ) from error
    except (UnicodeDecodeError, RefusedError) as error:
        raise StartupError(f"The token in {path} cannot be used: {error}", fix=how_to_get_one) from error
    exposure = ""
    # Of somebody else's file the group's bit is what lets this process in.
    if mode & (_READABLE if status.st_uid == os.geteuid() else stat.S_IROTH):
        exposure = (
            f"{path} has mode {mode:o}: others on this machine may read the token, and whoever spends it "
            f"first is let in. Run: chmod 600 {path}"
        )
    return TokenFile(text, token, exposure)


def check_fits(token: Token, *, run: RunDescription, role: Role) -> None:
    """Check that a token is for this run and role and has an address; not whether it has expired.

    Raises:
        StartupError: it is for another, or its address cannot be used.
    """
    fix = f"{how_to_get_a_token(role)}."
    if token.run_id != run.run_id or not is_same_certificate(
        token.ca_certificate_pem.encode(), run.ca_certificate_pem
    ):
        raise StartupError(
            f"The token is for run {token.run_id} of another authority than node.run_file names", fix=fix
        )
    if token.role != role:
        raise StartupError(f"The token is for a {token.role}, this node is a {role}", fix=fix)
    try:
        split_target(token.address)
    except ValueError as error:
        raise StartupError(f"The address in the token cannot be used: {error}", fix=fix) from error


def how_to_get_a_token(role: Role) -> str:
    """Return the command that makes a token for a role, as part of a sentence."""
    return (
        f"Make one where the coordinator runs: `heterorl-node token DIR --role {role} --address HOST:PORT "
        "--out FILE`"
    )


def write_token_file(path: Path, token: str) -> None:
    """Write a token so that only its owner may read it, whatever the umask; replaces the file.

    Raises:
        StartupError: it cannot be written.
    """
    try:
        write_secret(path, token.encode("ascii") + b"\n")
    except OSError as error:
        raise cannot_make(path, error, fix="Choose a file that can be written.") from error
