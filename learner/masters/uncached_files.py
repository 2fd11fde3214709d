"""Files as large as a model, written and read past the page cache.

Pages of a checkpoint that nobody reads cost a training host twice: the processors' time to fill them, some
seconds a gigabyte on a virtual machine, and whatever they push out. A file system without direct I/O is
written and read as usual.
"""

import errno
import fcntl
import io
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import blake3

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_BUFFER_BYTES: Final = 4 << 20
"""A multiple of every device's block."""


class UncachedFile(io.RawIOBase):
    """A new file that is written from its beginning to its end."""

    def __init__(self, path: Path) -> None:
        """Create the file.

        Raises:
            OSError: it exists or cannot be made.
        """
        self._descriptor = _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)
        """Aligned, as direct writes must be."""
        self._filled = 0
        self._written = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def tell(self) -> int:
        return self._written + self._filled

    def write(self, content: "ReadableBuffer") -> int:
        """Write all of ``content``; what is less than a buffer is held until ``close``."""
        rest = memoryview(content).cast("B")
        size_bytes = len(rest)
        while rest:
            part = rest[: _BUFFER_BYTES - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == _BUFFER_BYTES:
                self._flush_buffer()
        return size_bytes

    def close(self) -> None:
        """Write what is held, and wait until the file is on disk."""
        if self.closed:
            return
        try:
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # the end fills no block
            self._flush_buffer()
            os.fsync(self._descriptor)
        finally:
            super().close()
            os.close(self._descriptor)
            self._buffer.close()

    def _flush_buffer(self) -> None:
        with memoryview(self._buffer) as whole, whole[: self._filled] as held:
            done = 0
            while done < len(held):
                with held[done:] as rest:
                    done += os.write(self._descriptor, rest)
        self._written += self._filled
        self._filled = 0


def digest_of(path: Path) -> str:
    """Return the hex BLAKE3 digest of a file, as it is on disk.

    Raises:
        OSError: it cannot be read, or reading ended before the file did.
    """
    hasher, read = blake3.blake3(), 0
    descriptor = _opened(path, os.O_RDONLY)
    try:
        expected = os.fstat(descriptor).st_size
        with mmap.mmap(-1, _BUFFER_BYTES) as buffer, memoryview(buffer) as whole:
            while size_bytes := os.readv(descriptor, [buffer]):
                with whole[:size_bytes] as part:
                    hasher.update(part)
                read += size_bytes
                if size_bytes % mmap.PAGESIZE:
                    break  # the end of the file, from where a direct read is not aligned
        if read != expected:
            raise OSError(errno.EIO, f"read {read} of {expected} bytes", str(path))
    finally:
        os.close(descriptor)
    return hasher.hexdigest()


def _opened(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # Such a file system may have made the file before it refused.
    return os.open(path, (flags & ~os.O_EXCL) | os.O_CLOEXEC, 0o666)
