"""A machine that stops before anything it does to its disk, and what it finds there afterwards.

Three ways to stop, from kind to cruel:

    killed      the process ends, and what it wrote is there: kill -9
    torn        the same, in the middle of a write
    power cut   what was not synced is gone: contents since the last fsync of the file, names (made, renamed
                or removed) since that of their directory. A rename from one directory to another is two
                changes: between the two syncs the entry is in both, or in neither

Sees what goes through ``os``: rename, mkdir, unlink, fsync, write and pwrite. What is written in other ways
(file objects, safetensors) counts once it is synced. SQLite syncs by itself: each commit is a stop, and what
is in a database between two calls is there.
"""

import contextlib
import enum
import fcntl
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

_WRITES: Final = ("write", "pwrite")
_COMMIT: Final = "commit"
"""SQLite's: before it, some pages of a transaction may be written, and the journal that takes them back."""
_NAMES: Final = ("mkdir", "rename", "replace", "unlink", "rmdir")


class Stop(enum.Enum):
    """How the machine stops."""

    KILLED = "killed"
    TORN = "torn"
    POWER_CUT = "power cut"


class Acknowledged:
    """Newest number that others were told before the machine stopped."""

    def __init__(self) -> None:
        self.newest = 0

    def say(self, number: int) -> None:
        self.newest = number


class WatchedDisk:
    """Everything below one directory, as long as it is ``watched``."""

    def __init__(self, root: Path, *, stop: Stop, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._stop = stop
        self._monkeypatch = monkeypatch
        self._is_copying = False
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._kinds: dict[int, bool] = {}
        """By inode: whether it is a directory."""
        self._alive: list[int] = []
        """Descriptors that keep inodes from being used again."""

    @contextmanager
    def watched(self, copy_to: Callable[[], Path | None]) -> Iterator[None]:
        """Before each call, leave in ``copy_to()`` what a restart would find if the machine stopped there."""
        self._remember(self._root)
        with self._monkeypatch.context() as patched:
            for name in (*_WRITES, *_NAMES, "fsync"):
                patched.setattr(os, name, self._watching(name, getattr(os, name), copy_to))
            patched.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=self._connection(copy_to)))
            try:
                yield
            finally:
                patched.undo()
                for descriptor in self._alive:
                    os.close(descriptor)
                self._alive.clear()

    def copy(self, target: Path) -> None:
        """Make what a restart would find if the machine stopped now."""
        if self._stop is Stop.POWER_CUT:
            databases = self._root.rglob("*.sqlite")
            self._contents |= {path.stat().st_ino: path.read_bytes() for path in databases}
            self._restore(target, self._root.stat().st_ino)
        else:
            shutil.copytree(self._root, target)

    def _watching(
        self, name: str, call: Callable[..., Any], copy_to: Callable[[], Path | None]
    ) -> Callable[..., Any]:
        def watching(*arguments: Any, **options: Any) -> Any:
            if self._is_copying:
                return call(*arguments, **options)
            self._is_copying = True
            is_torn = self._stop is Stop.TORN
            # Where nothing is written, nothing is torn: KILLED finds that.
            if (not is_torn or name in (*_WRITES, _COMMIT)) and (target := copy_to()) is not None:
                self.copy(target)
                if is_torn and name in _WRITES:
                    self._write_half(target, *arguments)
            self._is_copying = False
            if name in ("unlink", "rename", "replace", "rmdir"):
                self._keep_alive(Path(os.fsdecode(arguments[-1])), options.get("dir_fd"))
            result = call(*arguments, **options)
            if name == "fsync":
                self._sync(arguments[0])
            return result

        return watching

    def _connection(self, copy_to: Callable[[], Path | None]) -> type[sqlite3.Connection]:
        stop = self._watching(_COMMIT, lambda: None, copy_to)

        class WatchedConnection(sqlite3.Connection):
            def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
                if sql == "COMMIT":
                    stop()
                return super().execute(sql, *values)

        return WatchedConnection

    def _write_half(self, target: Path, descriptor: int, data: Any, offset: int | None = None) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not path.is_relative_to(self._root):
            return
        copied = target / path.relative_to(self._root)
        with copied.open("r+b") as file:
            if offset is None:
                appends = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
                offset = copied.stat().st_size if appends else os.lseek(descriptor, 0, os.SEEK_CUR)
            file.seek(offset)
            file.write(bytes(data)[: len(data) // 2])

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

    def _restore(self, path: Path, inode: int) -> None:
        path.mkdir()
        for name, child in self._names.get(inode, {}).items():
            if self._kinds[child]:
                self._restore(path / name, child)
            else:
                (path / name).write_bytes(self._contents.get(child, b""))


def every_stop(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    stop: Stop,
    live: Callable[[Path], None],
    told: Sequence[Acknowledged],
    at_least: int,
) -> Iterator[Path]:
    """Run ``live`` once; find the machine stopped before each of its calls, the last time at its end.

    Yields:
        The directory as a restart finds it, once if it is the same after several calls; ``told`` is what it
        was when the machine stopped.
    Raises:
        AssertionError: there were fewer different ones than ``at_least``.
    """
    directory = root / "life"
    directory.mkdir()
    disk = WatchedDisk(directory, stop=stop, monkeypatch=monkeypatch)
    stops: list[tuple[Path, list[int]]] = []

    def next_stop() -> Path:
        stops.append((root / str(len(stops)), [each.newest for each in told]))
        return stops[-1][0]

    with disk.watched(next_stop):
        live(directory)
    disk.copy(next_stop())
    seen: set[tuple[object, ...]] = set()
    for found, newest in stops:
        state = (*newest, *_content(found))
        if state in seen:
            continue
        seen.add(state)
        for each, number in zip(told, newest, strict=True):
            each.say(number)
        yield found
    assert len(seen) >= at_least


def _content(root: Path) -> list[tuple[str, bytes | None]]:
    """Return each path below a directory, with the bytes of those that are files."""
    return [
        (str(path.relative_to(root)), None if path.is_dir() else path.read_bytes())
        for path in sorted(root.rglob("*"))
    ]


@contextmanager
def power_cut_after(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cut the power when the body is through."""
    disk = WatchedDisk(root, stop=Stop.POWER_CUT, monkeypatch=monkeypatch)
    with disk.watched(lambda: None):
        yield
    found = root.with_name(f"{root.name}-found")
    disk.copy(found)
    shutil.rmtree(root)
    found.rename(root)
