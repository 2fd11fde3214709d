"""Files written past the page cache: every byte in its place, with and without direct I/O."""

import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blake3
import pytest

from learner.masters.uncached_files import UncachedFile, digest_of

BUFFER = 4 << 20
OPEN = os.open


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Make a directory on a disk: files in memory take direct I/O of any alignment."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        yield Path(directory)


def write(path: Path, parts: list[bytes]) -> None:
    with UncachedFile(path) as file:
        for part in parts:
            assert file.tell() == sum(map(len, parts[: parts.index(part)]))
            file.write(part)


@pytest.fixture(params=["direct", "no direct I/O"])
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "direct":
        return

    def without_direct(path: Path, flags: int, mode: int = 0o777, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return OPEN(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", without_direct)


@pytest.mark.usefixtures("file_system")
@pytest.mark.parametrize(
    "sizes", [[], [1], [4096], [BUFFER], [BUFFER - 1, 2], [3, 2 * BUFFER + 4096], [BUFFER, BUFFER, 511]]
)
def test_a_file_has_what_was_written_to_it_and_the_digest_of_that(tmp_path: Path, sizes: list[int]) -> None:
    parts = [os.urandom(size) for size in sizes]
    write(tmp_path / "file", parts)
    assert (tmp_path / "file").read_bytes() == b"".join(parts)
    assert digest_of(tmp_path / "file") == blake3.blake3(b"".join(parts)).hexdigest()


@pytest.mark.usefixtures("file_system")
def test_a_read_that_ends_before_the_file_is_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a network file system may end one. The rest would have to be read from where no block begins."""
    write(tmp_path / "file", [os.urandom(3 * BUFFER)])
    read = os.readv

    def short(descriptor: int, buffers: list[mmap.mmap]) -> int:
        return min(read(descriptor, buffers), BUFFER - 100)

    monkeypatch.setattr(os, "readv", short)
    with pytest.raises(OSError, match=f"read {BUFFER - 100} of {3 * BUFFER} bytes") as error:
        digest_of(tmp_path / "file")
    assert error.value.errno == errno.EIO


def test_a_file_that_exists_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    with pytest.raises(FileExistsError):
        UncachedFile(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"kept"


def test_a_full_disk_is_an_error_of_the_write_and_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, content: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    held = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "write", full)
    file = UncachedFile(tmp_path / "file")
    with pytest.raises(OSError, match="No space left"):
        file.write(bytes(BUFFER))
    with pytest.raises(OSError, match="No space left"):
        file.close()
    assert len(os.listdir("/proc/self/fd")) == held
