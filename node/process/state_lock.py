"""One process per state directory: the first one holds its lock until it is gone."""

from pathlib import Path
from typing import Final

from node.file_lock import FileLock

LOCK_FILE: Final = "lock"

_FIX: Final = (
    "Stop that process first, or set node.state_dir to a directory of this one's own. "
    "Copying the directory does not help: a peer's name and keys belong to one process."
)


class StateLock:
    """The lock of one directory, held by this process until it ends.

    A process takes a lock once; roles that share process and directory share it too.
    """

    _held: Final[dict[Path, "StateLock"]] = {}
    """By directory, links resolved."""

    def __init__(self, directory: Path, lock: FileLock) -> None:
        """Own the lock of ``directory``; use ``take``."""
        self.directory = directory
        self._lock = lock

    @classmethod
    def take(cls, directory: Path) -> "StateLock":
        """Take the lock of a directory that exists, without waiting, for as long as this process lives.

        Raises:
            StartupError: another process has it, or nothing can be locked there.
        """
        resolved = directory.resolve()
        if resolved not in cls._held:
            lock = FileLock.take(directory / LOCK_FILE, of=f"The state directory {directory}", fix=_FIX)
            cls._held[resolved] = cls(directory, lock)
        return cls._held[resolved]
