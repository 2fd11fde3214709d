"""Files of a peer: secrets that only their owner may read; errors that name the closed file or folder.

"Permission denied" names the file that was asked for; what is closed is often a folder above it.
"""

import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node import durable
from node.errors import StartupError

_SECRET_MODE: Final = 0o600
_PUBLIC_MODE: Final = 0o644
_DIRECTORY_MODE: Final = 0o700


def make_private_directory(path: Path) -> None:
    """Create a directory that only its owner may enter, with its parents; an existing one is narrowed."""
    durable.make_directory(path, mode=_DIRECTORY_MODE)
    path.chmod(_DIRECTORY_MODE)


def write_secret(path: Path, content: bytes) -> None:
    """Replace a file that only its owner may read, atomically and durably."""
    durable.write(path, content, mode=_SECRET_MODE)


def write_public(path: Path, content: bytes) -> None:
    """Replace a file that anyone may read, atomically and durably."""
    durable.write(path, content, mode=_PUBLIC_MODE)


def read_secret(path: Path) -> bytes:
    """Read a secret.

    Raises:
        StartupError: it is missing, or others than its owner may read it.
    """
    try:
        # The descriptor is checked, not the path, so that the file checked is the file read.
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            if mode & 0o077:
                raise StartupError(
                    f"{path} holds a secret and has mode {mode:o}", fix=f"Run: chmod 600 {path}"
                )
            return file.read()
    except OSError as error:
        raise cannot_read(path, error, fix="Check path and owner.") from error


def cannot_make(path: Path, error: OSError, *, fix: str) -> StartupError:
    """Return the error for a directory or file that could not be made or written."""
    found = obstacle(path, error)
    return StartupError(f"{path} cannot be made: {found.what}", fix=found.fix or fix)


def cannot_read(path: Path, error: OSError, *, fix: str) -> StartupError:
    """Return the error for a file that could not be read; ``fix`` is for one that is not there."""
    found = obstacle(path, error)
    return StartupError(f"{path} cannot be read: {found.what}", fix=found.fix or fix)


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why one process cannot use one path."""

    what: str
    """Follows "... cannot be read: "."""
    fix: str
    """Empty where nothing better is known than what the caller says."""


def obstacle(path: Path, error: OSError) -> Obstacle:
    """Return why ``path`` could not be read or made, given what the system said."""
    closed = _closed(path) if isinstance(error, PermissionError) else None
    if closed is None:
        return Obstacle(error.strerror or str(error), "")
    status = closed.stat()
    owner, own = _name(status.st_uid), _name(os.geteuid())
    mode = stat.S_IMODE(status.st_mode)
    kind = "folder" if closed.is_dir() else "file"
    return Obstacle(
        f"Permission denied: the {kind} {closed} belongs to {owner} with mode {mode:o}, "
        f"and this process runs as {own}",
        f"Run this as {owner}, or let {own} in: chown or chmod {closed}, or choose another path.",
    )


def _closed(path: Path) -> Path | None:
    """Return the first part of a path that this process cannot pass; None where that is not known."""
    asked = path.absolute()
    for part in (*reversed(asked.parents), asked):
        try:
            part.lstat()
        except OSError:
            # Not there: the folder above it is the one that may not be written into.
            return None if part == part.parent else part.parent
        if part != asked and not os.access(part, os.X_OK, effective_ids=True):
            return part
    if asked.is_dir():
        return asked
    return asked if not os.access(asked, os.R_OK, effective_ids=True) else asked.parent


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
