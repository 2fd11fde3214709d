"""Memory that a sampler and the processes of its engine share, for frames on their way between them.

    slot 0   | worker 0's frame | worker 1's frame | ...     what a worker is told to take, or has read
    slot 1   | ...

A process that the sampler starts inherits its descriptor. Workers of vLLM find it as a file in a directory,
for as long as it takes them to map it. Without a name, nothing is left of it when all of them are gone. Both
sides trust the kernel and their own user: directory and file must belong to the user and be closed to all
others, or they are refused. So no other user can put words into a model, or read them.
"""

import mmap
import os
import re
import stat
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from node.values.limits import FRAME_WORDS

DIRECTORY_VARIABLE: Final = "HETERORL_WEIGHTS_DIR"
"""Names the weights directory to vLLM's workers, which open nothing elsewhere."""

MOST_SLOTS: Final = 64

_NAME: Final = re.compile(r"frames-[0-9a-f]{1,64}", re.ASCII)
_FRAME_BYTES: Final = 2 * FRAME_WORDS

Rooms = NDArray[np.uint16]
"""[slots, workers, FRAME_WORDS]"""


def make_frame_memory(directory: Path, name: str, *, slots: int, workers: int) -> Rooms:
    """Make the file and map it, and remove those of killed samplers; OSError if that is not safe."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = _opened_directory(directory)
    try:
        for left in os.listdir(folder):
            if _NAME.fullmatch(left):
                os.unlink(left, dir_fd=folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = os.open(name, flags, 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        # Reserved now: a directory in memory that fills up later would end whoever writes with SIGBUS.
        os.posix_fallocate(file, 0, slots * workers * _FRAME_BYTES)
    except OSError:
        os.close(file)
        remove_frame_memory(directory, name)
        raise
    return mapped(file, workers=workers)


def unnamed_frame_memory(*, slots: int) -> int:
    """Return the descriptor of memory without a name, for one process to inherit."""
    file = os.memfd_create("heterorl-frames", os.MFD_CLOEXEC)
    os.fchmod(file, 0o600)
    os.ftruncate(file, slots * _FRAME_BYTES)
    return file


def open_frame_memory(name: str, *, workers: int) -> Rooms:
    """Map a file in the directory that the environment names; OSError or ValueError if that is not safe."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a file with frames")
    if DIRECTORY_VARIABLE not in os.environ:
        raise ValueError(f"{DIRECTORY_VARIABLE} is not set where the server runs")
    folder = _opened_directory(Path(os.environ[DIRECTORY_VARIABLE]))
    try:
        file = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    return mapped(file, workers=workers)


def mapped(file: int, *, workers: int) -> Rooms:
    """Map a file and close it; OSError if it is another file, or others than this user can open it."""
    try:
        status = os.fstat(file)
        _check_owner(status, "the file with frames", mode="0600")
        slots, rest = divmod(status.st_size, workers * _FRAME_BYTES)
        if not stat.S_ISREG(status.st_mode) or rest or not 1 <= slots <= MOST_SLOTS:
            raise PermissionError(
                f"the file with frames is not a file of 1 to {MOST_SLOTS} frames for each of {workers} "
                f"workers: it has {status.st_size} bytes"
            )
        memory: Any = mmap.mmap(file, status.st_size)
    finally:
        os.close(file)
    return np.frombuffer(memory, np.uint16).reshape(slots, workers, FRAME_WORDS)


def remove_frame_memory(directory: Path, name: str) -> None:
    """Remove the file's name; who has mapped it keeps it."""
    (directory / name).unlink(missing_ok=True)


def _opened_directory(path: Path) -> int:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_owner(os.fstat(folder), f"the directory {path}", mode="0700")
    except OSError:
        os.close(folder)
        raise
    return folder


def _check_owner(status: os.stat_result, what: str, *, mode: str) -> None:
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{what} must have owner {os.geteuid()} and mode {mode}, and has owner {status.st_uid} and mode "
            f"{stat.S_IMODE(status.st_mode):04o}"
        )
