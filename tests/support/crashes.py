"""A machine that stops at the n-th thing it does to its disk, and what it finds there afterwards.

Three ways to stop, from kind to cruel:

    killed      the process ends, and what it wrote is there: kill -9
    torn        the same, in the middle of a write
    power cut   what was not synced is gone: contents since the last fsync of the file, names since that of
                the directory; only a rename is in both of its directories or in neither, as journals have it

Sees what goes through ``os``: rename, mkdir, unlink, fsync, write and pwrite. What is written in other ways
(file objects, safetensors) counts once it is synced.
"""

import contextlib
import enum
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

_WRITES: Final = ("write", "pwrite")
_NAMES: Final = ("mkdir", "rename", "replace", "unlink", "rmdir")


class Stop(enum.Enum):
    """How the machine stops."""

    KILLED = "killed"
    TORN = "torn"
    POWER_CUT = "power cut"


class Stopped(BaseException):
    """Nothing that comes after it happens any more."""


class CrashingDisk:
    """Everything below one directory, as long as ``watching``."""

    def __init__(self, root: Path, *, stop: Stop, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._stop = stop
        self._monkeypatch = monkeypatch
        self._left = 0
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._kinds: dict[int, bool] = {}
        """By inode: whether it is a directory."""
        self._renames: list[tuple[int, str, int, str]] = []
        """Not synced yet: from which directory and name to which."""
        self._alive: list[int] = []
        """Descriptors that keep inodes from being used again."""

    @contextmanager
    def stopping_at(self, number: int) -> Iterator[None]:
        """Stop at the n-th call, from 1, and at all that follow; then the disk is as a restart finds it."""
        self._left = number
        self._remember(self._root)
        with self._monkeypatch.context() as patched:
            for name in (*_WRITES, *_NAMES, "fsync"):
                patched.setattr(os, name, self._watched(name, getattr(os, name)))
            try:
                yield
            except Stopped:
                patched.undo()
                if self._stop is Stop.POWER_CUT:
                    self._lose_what_was_not_synced()
                raise
            finally:
                patched.undo()
                for descriptor in self._alive:
                    os.close(descriptor)
                self._alive.clear()

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left <= 0:
                if self._left == 0 and self._stop is Stop.TORN and name in _WRITES:
                    descriptor, data, *rest = arguments
                    call(descriptor, bytes(data)[: len(data) // 2], *rest)
                raise Stopped
            if name in ("unlink", "rename", "replace", "rmdir"):
                self._keep_alive(Path(os.fsdecode(arguments[-1])), options.get("dir_fd"))
            if name in ("rename", "replace"):
                self._note_rename(*(Path(os.fsdecode(path)) for path in arguments[:2]))
            result = call(*arguments, **options)
            if name == "fsync":
                self._sync(arguments[0])
            return result

        return watched

    def _keep_alive(self, path: Path, directory: int | None) -> None:
        with contextlib.suppress(OSError):  # nothing is there
            self._alive.append(os.open(path, os.O_RDONLY, dir_fd=directory))

    def _note_rename(self, source: Path, target: Path) -> None:
        directories = (source.parent.stat().st_ino, target.parent.stat().st_ino)
        self._renames.append((directories[0], source.name, directories[1], target.name))

    def _sync(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not path.is_relative_to(self._root):
            return
        if stat.S_ISDIR(status.st_mode):
            self._names[status.st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
            self._kinds |= {entry.inode(): entry.is_dir() for entry in os.scandir(path)}
            self._sync_renames(status.st_ino)
        else:
            self._contents[status.st_ino] = path.read_bytes()

    def _sync_renames(self, directory: int) -> None:
        """Take the renames of a directory that was synced out of, or into, the other one too."""
        for rename in [rename for rename in self._renames if directory in (rename[0], rename[2])]:
            self._renames.remove(rename)
            source, source_name, target, target_name = rename
            moved = self._names.get(source, {}).pop(source_name, None)
            if target != directory and moved is not None:
                self._names.setdefault(target, {})[target_name] = moved

    def _remember(self, path: Path) -> None:
        """Take what is there at the start for synced."""
        self._names[path.stat().st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
        for entry in os.scandir(path):
            self._kinds[entry.inode()] = entry.is_dir()
            if entry.is_dir():
                self._remember(Path(entry.path))
            else:
                self._contents[entry.inode()] = Path(entry.path).read_bytes()

    def _lose_what_was_not_synced(self) -> None:
        root = self._root.stat().st_ino
        shutil.rmtree(self._root)
        self._restore(self._root, root)

    def _restore(self, path: Path, inode: int) -> None:
        path.mkdir()
        for name, child in self._names.get(inode, {}).items():
            if self._kinds[child]:
                self._restore(path / name, child)
            else:
                (path / name).write_bytes(self._contents.get(child, b""))


def every_stop(
    root: Path, monkeypatch: pytest.MonkeyPatch, *, stop: Stop, live: Callable[[Path], None], most: int = 2000
) -> Iterator[Path]:
    """Run ``live`` on directory after directory, stopped one call later each time, until it gets through.

    Yields:
        The directory as a restart finds it.
    """
    for number in range(1, most):
        directory = root / str(number)
        directory.mkdir()
        disk = CrashingDisk(directory, stop=stop, monkeypatch=monkeypatch)
        try:
            with disk.stopping_at(number):
                live(directory)
        except Stopped:
            yield directory
            continue
        return
    raise AssertionError(f"not through after {most} calls")
