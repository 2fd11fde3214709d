"""One coordinator per ledger: a lock of its own, so that the ledger itself stays open to readers.

SQLite's exclusive mode kept backups out together with second coordinators. The lock is the kernel's
(flock): it ends with the process, however it ends. The file beside the ledger stays; it names the holder.
"""

import fcntl
import os
from pathlib import Path
from typing import Self

from node.errors import StartupError

_HOLDER_BYTES = 20
"""More than the longest process id."""


class LedgerLock:
    """The right to write a ledger, held until released."""

    def __init__(self, descriptor: int) -> None:
        """Own a descriptor that has the lock; use ``take``."""
        self._descriptor = descriptor

    @classmethod
    def take(cls, ledger: Path) -> Self:
        """Take the lock of a ledger, which need not exist yet, without waiting.

        Raises:
            StartupError: another process has it, or nothing can be locked there.
        """
        path = ledger.with_name(f"{ledger.name}.lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupError(
                f"the ledger {ledger} cannot be opened: {error}", fix="Check the path and its permissions."
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, _HOLDER_BYTES, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise StartupError(
                f"the ledger {ledger} is in use by another process (pid {holder})",
                fix="Stop the other coordinator of this run.",
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise StartupError(
                f"the ledger {ledger} cannot be locked: {error.strerror}",
                fix="Put node.state_dir on a file system that has locks.",
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return cls(descriptor)

    def release(self) -> None:
        """Let the next one have it."""
        os.close(self._descriptor)
