"""A write that returned has happened, whatever becomes of the power."""

import contextlib
import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from node.identity.files import make_private_directory, write_secret
from node.system import durable
from support.crashes import power_cut_after

Change = Callable[[Path], None]


def write_new(directory: Path) -> None:
    durable.write(directory / "file", b"new")


def write_over(directory: Path) -> None:
    durable.write(directory / "kept", b"new")


def write_a_secret(directory: Path) -> None:
    write_secret(directory / "file", b"new")


def append_first(directory: Path) -> None:
    durable.append(directory / "log", b"1\n")


def append_more(directory: Path) -> None:
    durable.append(directory / "kept", b" and more")


def rename_within(directory: Path) -> None:
    durable.rename(directory / "kept", directory / "moved")


def rename_across(directory: Path) -> None:
    durable.rename(directory / "kept", directory / "room" / "kept")


def make_directories(directory: Path) -> None:
    durable.make_directory(directory / "one" / "two")


def make_private(directory: Path) -> None:
    make_private_directory(directory / "one" / "two")


def sync_file(directory: Path) -> None:
    (directory / "kept").write_bytes(b"new")
    durable.sync(directory / "kept")


def sync_names(directory: Path) -> None:
    (directory / "kept").unlink()
    durable.sync(directory)


@pytest.mark.parametrize(
    ("change", "files"),
    [
        (write_new, {"kept": b"old", "file": b"new"}),
        (write_over, {"kept": b"new"}),
        (write_a_secret, {"kept": b"old", "file": b"new"}),
        (append_first, {"kept": b"old", "log": b"1\n"}),
        (append_more, {"kept": b"old and more"}),
        (rename_within, {"moved": b"old"}),
        (rename_across, {"room/kept": b"old"}),
        (make_directories, {"kept": b"old", "one/two": None}),
        (make_private, {"kept": b"old", "one/two": None}),
        (sync_file, {"kept": b"new"}),
        (sync_names, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_change_that_returned_is_there_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, files: dict[str, bytes | None]
) -> None:
    (tmp_path / "kept").write_bytes(b"old")
    (tmp_path / "room").mkdir()
    with power_cut_after(tmp_path, monkeypatch):
        change(tmp_path)
    found = {str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*") if path.name != "room"}
    found.pop("one", None)
    assert {name: path.read_bytes() if path.is_file() else None for name, path in found.items()} == files


def test_the_model_forgets_what_was_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kept", "removed", "renamed", "written"):
        (tmp_path / name).write_bytes(b"old")
    (tmp_path / "room").mkdir()
    with power_cut_after(tmp_path, monkeypatch):
        (tmp_path / "made").write_bytes(b"new")
        durable.sync(tmp_path / "made")
        (tmp_path / "written").write_bytes(b"new")
        (tmp_path / "removed").unlink()
        (tmp_path / "renamed").rename(tmp_path / "room" / "renamed")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == dict.fromkeys(
        ("kept", "removed", "renamed", "written"), b"old"
    )
    assert not list((tmp_path / "room").iterdir())


def fail_with(code: int) -> Callable[[int], None]:
    def fsync(_: int) -> None:
        raise OSError(code, os.strerror(code))

    return fsync


def test_a_disk_that_fails_leaves_the_file_as_it_was_and_the_room_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", fail_with(errno.EIO))
    for change in (write_over, append_more, append_first):
        with pytest.raises(OSError, match="Input/output error"):
            change(tmp_path)
        assert path.read_bytes() == b"old"
    assert {each.name: each.stat().st_size for each in tmp_path.iterdir()} == {"kept": 3, "log": 0}


def test_a_file_that_was_left_over_does_not_lend_its_mode(tmp_path: Path) -> None:
    (tmp_path / ".secret.new").touch(mode=0o666)
    durable.write(tmp_path / "secret", b"x", mode=0o600)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_files_and_directories_are_as_open_as_the_umask_lets_them_be(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        durable.write(tmp_path / "written", b"")
        durable.append(tmp_path / "log", b"")
        durable.make_directory(tmp_path / "one" / "two", mode=0o700)
        durable.make_directory(tmp_path / "three")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o7777 for path in tmp_path.rglob("*")}
    assert modes == {"written": 0o644, "log": 0o644, "one": 0o755, "two": 0o700, "three": 0o755}


def test_all_is_appended_however_little_each_write_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:3]))
    durable.append(tmp_path / "log", b"0123456789")
    assert (tmp_path / "log").read_bytes() == b"0123456789"


def test_a_file_that_was_replaced_is_there_although_its_name_may_not_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(durable, "sync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        durable.write(tmp_path / "file", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"new")]


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        durable.write(tmp_path / "file", b"new")
        durable.append(tmp_path / "log", b"1")
        durable.sync(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_directory_that_another_process_makes_meanwhile_is_as_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made"
    made.mkdir()
    monkeypatch.setattr(Path, "exists", lambda path: path != made)
    durable.make_directory(made)


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (OSError(errno.ENOSPC, "full"), "make room on the disk"),
        (OSError(errno.EDQUOT, "quota"), "make room on the disk"),
        (OSError(errno.EROFS, "read-only"), "make the disk writable"),
        (PermissionError(errno.EACCES, "denied"), "let this process's user write"),
        (OSError(errno.EIO, "broken"), "see what is wrong with the disk"),
        (OSError(errno.EMFILE, "files"), "raise the limit of open files"),
    ],
)
def test_what_to_do_follows_from_the_error(error: OSError, fix: str) -> None:
    assert durable.disk_fix(error, disk="the disk").startswith(fix)


def test_a_database_in_a_file_that_cannot_be_written_is_not_told_to_be_full(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with contextlib.closing(sqlite3.connect(path)) as made:
        made.execute("CREATE TABLE t (x)")
    with (
        contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection,
        pytest.raises(sqlite3.OperationalError) as error,
    ):
        connection.execute("INSERT INTO t VALUES (1)")
    assert durable.disk_fix(error.value, disk="the disk").startswith("make the disk writable")
