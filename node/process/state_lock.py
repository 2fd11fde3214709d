"""The lock of a state directory: one process may use it at a time."""

from pathlib import Path
from typing import Final

from node.file_lock import FileLock

LOCK_FILE: Final = "lock"

_FIX: Final = (
    "Stop that process first, or set node.state_dir to a directory of this one's own. "
    "Copying the directory does not help: a peer's name and keys belong to one process."
)


class StateLock:
    """The lock of one directory, held until this process ends; roles of one process share it."""

    _held: Final[dict[Path, "StateLock"]] = {}
    """By directory, links resolved."""

    def __init__(self, directory: Path, lock: FileLock) -> None:
        """Own the lock of ``directory``; use ``take``."""
        self.directory = directory
        self._lock = lock

    @classmethod
    def take(cls, directory: Path) -> "StateLock":
        """Take the lock of an existing directory, without waiting, until this process ends.

        Raises:
            StartupError: another process has it, or nothing can be locked there.
        """
        resolved = directory.resolve()
        if resolved not in cls._held:
            lock = FileLock.take(directory / LOCK_FILE, of=f"The state directory {directory}", fix=_FIX)
            cls._held[resolved] = cls(directory, lock)
        return cls._held[resolved]
