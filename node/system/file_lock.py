"""A file lock (flock) that ends with its process; the file names the holder.

The kernel releases the lock however the process ends, so there is nothing to clean up after a kill or a power
cut. The file stays; its content is for people only.
"""

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from node.errors import StartupError

_CONTENT_BYTES: Final = 400
"""More than a pid and the longest host name."""

_HELD_ELSEWHERE: Final = frozenset({errno.EWOULDBLOCK, errno.EACCES})


class FileLock:
    """A lock held until released. A child process does not inherit it (close-on-exec)."""

    def __init__(self, descriptor: int) -> None:
        """Own ``descriptor``, which is locked already; use ``take``."""
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: Path, *, of: str, fix: str) -> Self:
        """Acquire the lock without waiting; create the file, but not its directory, if needed.

        Args:
            of: what the lock protects, as the subject of a sentence.
            fix: what to do if another process has it.
        Raises:
            StartupError: another process has it, or the file cannot be locked.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupError(
                f"{path} cannot be opened: {error.strerror}",
                fix="Set node.state_dir to a directory this user can write.",
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(descriptor)
            os.close(descriptor)
            if error.errno in _HELD_ELSEWHERE:
                raise StartupError(f"{of} is in use by {holder}", fix=fix) from error
            raise StartupError(
                f"{of} cannot be locked: {error.strerror}. Two processes would destroy each other's files",
                fix="Set node.state_dir to a file system that supports flock, such as a local disk.",
            ) from error
        with suppress(OSError):  # On a full disk the lock still holds; only the holder's name is missing.
            _sign(descriptor)
        return cls(descriptor)

    def release(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)


def _sign(descriptor: int) -> None:
    content = f"{os.getpid()} {socket.gethostname()}\n".encode()
    os.pwrite(descriptor, content, 0)
    os.ftruncate(descriptor, len(content))


def _holder(descriptor: int) -> str:
    """Return the holder that the file names."""
    try:
        pid, host = os.pread(descriptor, _CONTENT_BYTES, 0).decode().split()
        return f"process {int(pid)} on {host}"
    except (OSError, ValueError):
        return "another process"


LOCK_FILE: Final = "lock"

_held: Final[dict[Path, FileLock]] = {}
"""Locks of state directories, links resolved."""


def lock_state_directory(directory: Path) -> None:
    """Lock an existing directory, without waiting, until this process ends; its roles share the lock.

    Raises:
        StartupError: another process has it, or nothing can be locked there.
    """
    resolved = directory.resolve()
    if resolved not in _held:
        fix = (
            "Stop that process first, or set node.state_dir to a directory of this one's own. "
            "Copying the directory does not help: a peer's name and keys belong to one process."
        )
        _held[resolved] = FileLock.take(directory / LOCK_FILE, of=f"The state directory {directory}", fix=fix)
