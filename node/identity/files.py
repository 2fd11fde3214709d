"""Files of a peer: secrets that only their owner may read; errors that name the closed file or folder.

"Permission denied" names the file that was asked for; what is closed is often a folder above it.
"""

import os
import pwd
import stat
from pathlib import Path
from typing import Final

from node.errors import StartupError
from node.system import durable

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
    """Read a secret. Raises StartupError: it is missing, or others than its owner may read it."""
    try:
        content, status = read_with_status(path)
    except OSError as error:
        raise cannot_read(path, error, fix="Check path and owner.") from error
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise StartupError(f"{path} holds a secret and has mode {mode:o}", fix=f"Run: chmod 600 {path}")
    return content


def read_with_status(path: Path, most_bytes: int = -1) -> tuple[bytes, os.stat_result]:
    """Read a file and its status by one descriptor, so that the file checked is the file read."""
    with path.open("rb") as file:
        return file.read(most_bytes), os.fstat(file.fileno())


def cannot_make(path: Path, error: OSError, *, fix: str) -> StartupError:
    """Return the error for a directory or file that could not be made or written."""
    return _cannot("made", path, error, fix)


def cannot_read(path: Path, error: OSError, *, fix: str) -> StartupError:
    """Return the error for a file that could not be read; ``fix`` is for one that is not there."""
    return _cannot("read", path, error, fix)


def _cannot(done: str, path: Path, error: OSError, fix: str) -> StartupError:
    what = error.strerror or str(error)
    if isinstance(error, PermissionError):
        closed = _closed(path)
        status = closed.stat()
        owner, own = _name(status.st_uid), _name(os.geteuid())
        kind, mode = "folder" if closed.is_dir() else "file", stat.S_IMODE(status.st_mode)
        what = (
            f"Permission denied: the {kind} {closed} belongs to {owner} with mode {mode:o}, "
            f"and this process runs as {own}"
        )
        fix = f"Run this as {owner}, or let {own} in: chown or chmod {closed}, or choose another path."
    return StartupError(f"{path} cannot be {done}: {what}", fix=fix)


def _closed(path: Path) -> Path:
    """Return the first part of a path that this process cannot pass, else the folder it cannot write into."""
    asked = path.absolute()
    there = [part for part in (*reversed(asked.parents), asked) if os.path.lexists(part)]
    for part in there:
        if not os.access(part, os.X_OK if os.path.isdir(part) else os.R_OK, effective_ids=True):
            return part
    return there[-1] if os.path.isdir(there[-1]) else there[-1].parent


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
