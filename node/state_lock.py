"""One process per state directory: the first one holds its lock until it is gone.

The lock is the kernel's (flock) and ends with the process, however it ends: there is nothing to clean up
after a kill or a power cut. The file says who holds it, for people; what counts is the lock.
"""

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

from node.errors import StartupError

LOCK_FILE: Final = "lock"

_CONTENT_BYTES: Final = 400
"""More than a pid and the longest host name."""

_HELD_ELSEWHERE: Final = frozenset({errno.EWOULDBLOCK, errno.EACCES})


class StateLock:
    """The lock of one directory, held by this process until it ends.

    A process takes a lock once; roles that share process and directory share it too. The descriptor is
    closed by exec: a grader or another child does not keep the lock when its parent is gone.
    """

    _held: Final[dict[tuple[int, int], "StateLock"]] = {}
    """By device and inode of the file."""

    def __init__(self, directory: Path, descriptor: int) -> None:
        """Own ``descriptor``, which has the lock of ``directory``; use ``take``."""
        self.directory = directory
        self._descriptor = descriptor

    @classmethod
    def take(cls, directory: Path) -> "StateLock":
        """Take the lock of a directory that exists, without waiting, for as long as this process lives.

        Raises:
            StartupError: another process has it, or nothing can be locked there.
        """
        path = directory / LOCK_FILE
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupError(
                f"{path} cannot be opened: {error.strerror}",
                fix="Set node.state_dir to a directory this user can write.",
            ) from error
        status = os.fstat(descriptor)
        inode = (status.st_dev, status.st_ino)
        if inode in cls._held:
            os.close(descriptor)
            return cls._held[inode]
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise _refusal(directory, error, holder) from error
        with suppress(OSError):  # On a full disk the lock holds all the same; only its name is missing.
            _sign(descriptor)
        cls._held[inode] = cls(directory, descriptor)
        return cls._held[inode]


def _sign(descriptor: int) -> None:
    content = f"{os.getpid()} {socket.gethostname()}\n".encode()
    os.pwrite(descriptor, content, 0)
    os.ftruncate(descriptor, len(content))


def _holder(descriptor: int) -> str:
    """Return who holds the lock, as far as the file says."""
    try:
        pid, host = os.pread(descriptor, _CONTENT_BYTES, 0).decode().split()
        return f"process {int(pid)} on {host}"
    except (OSError, ValueError):
        return "another process"


def _refusal(directory: Path, error: OSError, holder: str) -> StartupError:
    if error.errno in _HELD_ELSEWHERE:
        return StartupError(
            f"The state directory {directory} is in use by {holder}",
            fix="Stop that process first, or set node.state_dir to a directory of this one's own. "
            "Copying the directory does not help: a peer's name and keys belong to one process.",
        )
    return StartupError(
        f"The state directory {directory} cannot be locked: {error.strerror}. "
        "Two processes in it would destroy each other's files",
        fix="Set node.state_dir to a file system that has flock, such as a local disk.",
    )
