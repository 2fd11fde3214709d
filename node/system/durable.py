"""Durable writes: once a call has returned, a power cut cannot undo it.

    write, replacing    a file under its name: the old content or the new, never half of either
    append              more at the end of a file
    rename              an entry to another name or directory
    make_directory      a directory with its parents
    sync                what another library wrote

POSIX promises nothing about a file before it is synced, nor about its name before the directory is. Code that
acknowledges, announces or relies on something afterwards writes it through this module.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

DISK_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})
"""Errors of a disk that is full (or over a quota or file size limit), failing or mounted read-only.
An operator can repair that while the process waits; any other error of a write is a bug."""


def disk_fix(error: Exception, *, disk: str) -> str:
    """Return what to do about a write that failed, by an operating system's error or SQLite's.

    ``disk`` names it: "the coordinator's disk".
    """
    number, name = getattr(error, "errno", None), str(getattr(error, "sqlite_errorname", ""))
    if number == errno.EROFS or name.startswith("SQLITE_READONLY"):
        return f"make {disk} writable: it is mounted read-only, or the file is another user's (mount, ls -l)"
    if number in (errno.EACCES, errno.EPERM) or name in ("SQLITE_PERM", "SQLITE_AUTH"):
        return f"let this process's user write on {disk} (ls -l)"
    if number == errno.EMFILE or name == "SQLITE_CANTOPEN":
        return "raise the limit of open files (LimitNOFILE), and see whether the file is there"
    if number == errno.EIO or name.startswith("SQLITE_IOERR"):
        return f"see what is wrong with {disk} (dmesg)"
    return f"make room on {disk}"


def write(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replace or create a file, as ``replacing`` does."""
    with replacing(path, mode=mode) as file:
        file.write(content)


@contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a file that replaces ``path`` when the body ends.

    If the body or the disk fails, ``path`` is as it was and the space is freed.

    Args:
        mode: permissions of the new file, narrowed by the umask.
    Raises:
        OSError: it cannot be written.
    """
    staged = path.with_name(f".{path.name}.new")
    # O_EXCL after unlink: neither keep the mode of a killed process's left-over, nor follow it as a link.
    staged.unlink(missing_ok=True)
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        rename(staged, path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def append(path: Path, content: bytes) -> None:
    """Append to a file, creating it if needed: all of ``content``, or nothing if the disk fails.

    A process that is killed in between leaves a part of it.

    Raises:
        OSError: it cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        end = os.fstat(descriptor).st_size
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
            if not end:
                sync(path.parent)
        except OSError:
            os.ftruncate(descriptor, end)
            raise
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Rename an entry, within a directory or from one to another.

    The target directory is synced first: after a power cut in between, the entry is in both and not lost.

    Raises:
        OSError: it cannot be renamed, or one of the directories cannot be synced.
    """
    source.replace(target)
    sync(target.parent)
    if source.parent != target.parent:
        sync(source.parent)


def make_directory(directory: Path, *, mode: int = 0o777) -> None:
    """Make a directory with its parents, unless it exists.

    Args:
        mode: its permissions, narrowed by the umask; parents get the default.
    """
    if not directory.exists():
        make_directory(directory.parent)
        directory.mkdir(mode=mode, exist_ok=True)
        sync(directory.parent)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a directory, are on disk.

    Raises:
        OSError: it does not exist, or the disk fails.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
