"""A Unix socket between two parts of this process: where it is, whatever TMPDIR says.

A socket's path takes at most 107 bytes, and a cluster's scratch directory has 80. The socket is in a private
directory: of the usual places the first where one can be made and whose path is short. Where there is none,
as on a read-only file system, it has an abstract name, which other users of the machine could connect to.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.errors import Reason, RefusedError

PATH_BYTES: Final = 107
"""Longest path of a Unix socket on Linux, without the zero at its end."""

NAME_BYTES: Final = 64
"""Longest name in the directory: a caller's IPv6 address with port and the name of a network interface."""

INNER: Final = "inner"


@dataclass(frozen=True, slots=True)
class PrivateSocket:
    """Where the socket and those that connect to it are."""

    place: str
    """A directory; or, with a zero before it, the beginning of abstract names."""

    @property
    def grpc_address(self) -> str:
        """The address for gRPC to listen on."""
        return f"unix-abstract:{self.place[1:]}/{INNER}" if self.is_abstract else f"unix:{self.place}/{INNER}"

    @property
    def path(self) -> str:
        """The address to connect to."""
        return f"{self.place}/{INNER}"

    @property
    def is_abstract(self) -> bool:
        return self.place.startswith("\0")

    def name_of(self, caller: str) -> str:
        """Return an address to connect from, which names a caller."""
        return f"{self.place}/{caller[:NAME_BYTES]}"

    async def connect(self, caller: str) -> socket.socket:
        """Connect to the server under a caller's address, which it logs.

        Raises RefusedError: INTERNAL; it is not reached, which is not the caller's fault.
        """
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.setblocking(False)
            name = self.name_of(caller)
            connection.bind(name)
            try:
                await asyncio.get_running_loop().sock_connect(connection, self.path)
            finally:
                if not self.is_abstract:
                    os.unlink(name)
        except OSError as error:
            connection.close()
            raise RefusedError(
                Reason.INTERNAL, f"the server behind the port is not reached: {error}"
            ) from error
        except BaseException:
            connection.close()
            raise
        return connection


@contextlib.contextmanager
def private_socket() -> Iterator[PrivateSocket]:
    """Yield a place for the socket, which is removed afterwards."""
    with contextlib.ExitStack() as stack:
        for parent in _parents():
            try:
                directory = stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="heterorl-", dir=parent, ignore_cleanup_errors=True)
                )
            except OSError:
                continue  # it cannot be written, or is not there
            yield PrivateSocket(directory)
            return
        yield PrivateSocket(f"\0heterorl-{secrets.token_hex(8)}")


def _parents() -> Iterator[str]:
    longest = PATH_BYTES - NAME_BYTES - len("/heterorl-12345678/")
    wanted = (os.environ.get(name, "") for name in ("TMPDIR", "XDG_RUNTIME_DIR"))
    for parent in dict.fromkeys((*wanted, "/tmp", "/dev/shm", "/var/tmp")):
        if Path(parent).is_absolute() and len(os.fsencode(parent)) <= longest:
            yield parent
