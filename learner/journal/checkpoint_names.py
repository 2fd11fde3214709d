"""The names of a learner's checkpoints, for commands that must not wait for torch."""

from pathlib import Path
from typing import Final

CHECKPOINTS: Final = "checkpoints"
"""Directory of a learner's state."""


def checkpoint_name(version: int) -> str:
    """Return the name of a version's checkpoint."""
    return f"{version:012d}"


def checkpoint_names(directory: Path) -> list[str]:
    """Return the names of the checkpoints in a directory, the oldest first."""
    return sorted(path.name for path in directory.iterdir() if path.name.isdecimal())


def versions_in(directory: Path) -> list[int]:
    """Return the versions with a checkpoint in a directory that a learner may be writing to, ascending."""
    return [int(name) for name in checkpoint_names(directory)] if directory.is_dir() else []
