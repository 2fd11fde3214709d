"""A machine that stops at the n-th thing it does to its disk, and what it finds there afterwards.

Three ways to stop, from kind to cruel:

    killed      the process ends, and what it wrote is there: kill -9
    torn        the same, in the middle of a write
    power cut   what was not synced is gone: contents since the last fsync of the file, names (made, renamed
                or removed) since that of their directory. A rename from one directory to another is two
                changes: between the two syncs the entry is in both, or in neither

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
        self._alive: list[int] = []
        """Descriptors that keep inodes from being used again."""

    @contextmanager
    def stopping_at(self, number: int) -> Iterator[None]:
        """Stop at the n-th call, from 1, and at all that follow, or else when the body is through.

        Afterwards the disk is as a restart finds it.
        """
        self._left = number
        self._remember(self._root)
        with self._monkeypatch.context() as patched:
            for name in (*_WRITES, *_NAMES, "fsync"):
                patched.setattr(os, name, self._watched(name, getattr(os, name)))
            try:
                yield
            finally:
                patched.undo()
                if self._stop is Stop.POWER_CUT:
                    self._lose_what_was_not_synced()
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
            result = call(*arguments, **options)
            if name == "fsync":
                self._sync(arguments[0])
            return result

        return watched

    def _keep_alive(self, path: Path, directory: int | None) -> None:
        with contextlib.suppress(OSError):  # nothing is there
            self._alive.append(os.open(path, os.O_RDONLY, dir_fd=directory))

    def _sync(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not path.is_relative_to(self._root):
            return
        if stat.S_ISDIR(status.st_mode):
            self._names[status.st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
            self._kinds |= {entry.inode(): entry.is_dir() for entry in os.scandir(path)}
        else:
            self._contents[status.st_ino] = path.read_bytes()

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
    """Run ``live`` on directory after directory, stopped one call later each time, the last time at its end.

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
        else:
            yield directory
            return
    raise AssertionError(f"not through after {most} calls")


@contextmanager
def power_cut_after(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cut the power when the body is through."""
    with CrashingDisk(root, stop=Stop.POWER_CUT, monkeypatch=monkeypatch).stopping_at(1 << 30):
        yield
