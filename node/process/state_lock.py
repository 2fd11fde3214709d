"""The lock of a state directory: one process may use it at a time."""

from pathlib import Path
from typing import Final

from node.file_lock import FileLock

LOCK_FILE: Final = "lock"

_FIX: Final = (
    "Stop that process first, or set node.state_dir to a directory of this one's own. "
    "Copying the directory does not help: a peer's name and keys belong to one process."
)


_held: Final[dict[Path, FileLock]] = {}
"""By directory, links resolved."""


def lock_state_directory(directory: Path) -> FileLock:
    """Lock an existing directory, without waiting, until this process ends; its roles share the lock.

    Raises:
        StartupError: another process has it, or nothing can be locked there.
    """
    resolved = directory.resolve()
    if resolved not in _held:
        _held[resolved] = FileLock.take(
            directory / LOCK_FILE, of=f"The state directory {directory}", fix=_FIX
        )
    return _held[resolved]
