"""The gate before the port for strangers: few connections, few bytes, a short time.

    stranger --TCP--> gate --private socket--> gRPC server: TLS, calls

gRPC's Python server cannot bound its connections. Here callers have no certificate, and all that an honest
one wants is one call of a few kilobytes. A connection takes three descriptors from members, so the number
of connections follows from the number of descriptors. The members' port has no such gate: it carries weights.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from node import descriptors
from node.errors import CountRefusal, Reason
from node.rpc.address import join_address, listening_socket
from node.rpc.places import NoPlaceError, PlaceLimits, Places, origin
from node.rpc.private_socket import PrivateSocket
from node.waits import put_away

logger = logging.getLogger(__name__)

SERVICE: Final = "EnrolmentService"
_CHUNK_BYTES: Final = 16 << 10


@dataclass(frozen=True, slots=True)
class GateLimits:
    """Bounds on the connections of strangers."""

    places: PlaceLimits
    idle_s: float = 10.0
    """Longest a stranger may say nothing."""
    age_s: float = 30.0
    """Longest a connection may last: handshake, call and answer, on the worst link."""
    received_bytes: int = 64 << 10
    """Most that a stranger may send: an enrolment takes 12 KB, repeated in full a few times."""


def limits_for(most_descriptors: int) -> GateLimits:
    """Return limits that leave members at least nine tenths of the descriptors."""
    connections = max(16, min(most_descriptors // 32, 256))
    return GateLimits(PlaceLimits(connections, max(8, connections // 4), kept_s=5.0))


class _OwnFaultError(Exception):
    """The server behind the gate is not reached: not the stranger's fault."""


class StrangersGate:
    """Lets strangers through to a server that listens on a private socket."""

    def __init__(self, count_refusal: CountRefusal, limits: GateLimits | None = None) -> None:
        self._count_refusal = count_refusal
        self._limits = limits or limits_for(descriptors.limit())
        self._places = Places["asyncio.Task[None]"](self._limits.places)
        self._inner: PrivateSocket | None = None

    @contextlib.asynccontextmanager
    async def open(self, listen: str, inner: PrivateSocket) -> AsyncIterator[str]:
        """Forward connections to the socket ``inner`` while the body runs; yield the address with its port.

        Raises OSError: the address cannot be bound.
        """
        self._inner = inner
        listener = listening_socket(listen)
        address = join_address(*listener.getsockname()[:2])
        tasks: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._serve(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_server(accept, sock=listener, limit=_CHUNK_BYTES)
        try:
            yield address
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            host, port = (writer.get_extra_info("peername") or ("", 0))[:2]
            displaced = self._places.enter(task, origin(host), now=asyncio.get_running_loop().time())
            if displaced is not None:
                displaced.cancel()
                self._refuse(Reason.BUSY)
            async with asyncio.timeout(self._limits.age_s):
                await self._forward(reader, writer, caller=join_address(host, port))
        except (NoPlaceError, TimeoutError):
            self._refuse(Reason.BUSY)
        except _OwnFaultError as error:
            logger.error("stranger not served", extra={"error": str(error.__cause__)})
            self._refuse(Reason.INTERNAL)
        except OSError:
            pass  # either end is gone
        finally:
            self._places.leave(task)
            writer.transport.abort()

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, caller: str
    ) -> None:
        inner_reader, inner_writer = await self._connect(caller)
        try:
            sending = asyncio.ensure_future(self._send(reader, inner_writer))
            answering = asyncio.ensure_future(_copy(inner_reader, writer))
            try:
                done, _ = await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                await put_away(sending, answering)
            writer.close()
            await writer.wait_closed()
        finally:
            inner_writer.transport.abort()

    async def _connect(self, caller: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the server under the caller's address, which it logs."""
        assert self._inner is not None
        try:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.setblocking(False)
                name = self._inner.name_of(caller)
                connection.bind(name)
                try:
                    await asyncio.get_running_loop().sock_connect(connection, self._inner.path)
                finally:
                    if not self._inner.is_abstract:
                        os.unlink(name)
                return await asyncio.open_unix_connection(sock=connection, limit=_CHUNK_BYTES)
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            raise _OwnFaultError from error

    async def _send(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy what a stranger sends, within the limits. Raises TimeoutError: it was silent for too long."""
        left_bytes = self._limits.received_bytes
        while left_bytes > 0:
            async with asyncio.timeout(self._limits.idle_s):
                chunk = await reader.read(min(left_bytes, _CHUNK_BYTES))
            if not chunk:
                return
            left_bytes -= len(chunk)
            writer.write(chunk)
            await writer.drain()
        # It is read no further. What the server says to it still arrives.
        self._refuse(Reason.OVER_LIMIT)
        await asyncio.sleep(self._limits.idle_s)

    def _refuse(self, reason: Reason) -> None:
        self._count_refusal(service=SERVICE, reason=reason)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
