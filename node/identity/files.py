"""Writing identity files: secrets readable by their owner only, whole or not at all."""

import os
from pathlib import Path
from typing import Final

from node import durable
from node.errors import StartupError
from node.identity.access import cannot_read

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
