"""Why a file cannot be reached, as a person who has to mend it needs it: which, whose, who asks.

"Permission denied" names the file that was asked for; what is closed is often a folder above it.
"""

import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

from node.errors import StartupError


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What stands in the way of one process to one path."""

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


def cannot_make(path: Path, error: OSError, *, fix: str) -> StartupError:
    """Return the answer to a directory or file that could not be made or written."""
    found = obstacle(path, error)
    return StartupError(f"{path} cannot be made: {found.what}", fix=found.fix or fix)


def cannot_read(path: Path, error: OSError, *, fix: str) -> StartupError:
    """Return the answer to a file that could not be read; ``fix`` is for one that is not there."""
    found = obstacle(path, error)
    return StartupError(f"{path} cannot be read: {found.what}", fix=found.fix or fix)


def _closed(path: Path) -> Path | None:
    """Return the first part of a path that does not let this process on; None if it cannot be told."""
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
