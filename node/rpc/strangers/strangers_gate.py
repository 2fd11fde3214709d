"""The gate before the port for strangers: few connections, few bytes, a short time.

    stranger --TCP--> entrance --limits--> private socket --> gRPC server: TLS, calls

gRPC's Python server cannot bound its connections. Here callers have no certificate, and all that an honest
one wants is one call of a few kilobytes. A connection takes three descriptors from members, so the number
of connections follows from the number of descriptors. The members' port has no such gate: it carries weights.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from node.errors import CountRefusal, Reason
from node.rpc.strangers.entrance import Entrance
from node.rpc.strangers.exchange import CHUNK_BYTES
from node.rpc.strangers.places import PlaceLimits, Places
from node.rpc.strangers.private_socket import PrivateSocket
from node.system import descriptors
from node.system.waits import put_away

SERVICE: Final = "EnrolmentService"


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


class StrangersGate:
    """Lets strangers through to a server that listens on a private socket."""

    def __init__(self, count_refusal: CountRefusal, limits: GateLimits | None = None) -> None:
        self._limits = limits or limits_for(descriptors.limit())
        self._entrance = Entrance(SERVICE, Places(self._limits.places), count_refusal=count_refusal)

    @contextlib.asynccontextmanager
    async def open(self, listen: str, inner: PrivateSocket) -> AsyncIterator[str]:
        """Forward connections to the socket ``inner`` while the body runs; yield the address with its port.

        Raises OSError: the address cannot be bound.
        """
        async with self._entrance.open(listen, partial(self._serve, inner)) as address:
            yield address

    async def _serve(self, inner: PrivateSocket, stranger: socket.socket, caller: str) -> None:
        async with asyncio.timeout(self._limits.age_s):
            with await inner.connect(caller) as server:
                sending = asyncio.create_task(self._send(stranger, server))
                answering = asyncio.create_task(_copy(server, stranger))
                try:
                    done, _ = await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                finally:
                    await put_away(sending, answering)

    async def _send(self, stranger: socket.socket, server: socket.socket) -> None:
        """Copy what a stranger sends, within the limits. Raises TimeoutError: it was silent for too long."""
        limits = self._limits
        if await _copy(stranger, server, most_bytes=limits.received_bytes, idle_s=limits.idle_s) == 0:
            # It is read no further. What the server says to it still arrives.
            self._entrance.refuse(Reason.OVER_LIMIT)
            await asyncio.sleep(limits.idle_s)


async def _copy(
    source: socket.socket,
    sink: socket.socket,
    *,
    most_bytes: float = float("inf"),
    idle_s: float | None = None,
) -> float:
    """Copy until ``source`` ends, which ``sink`` is told, or ``most_bytes`` are copied; return what is left.

    Raises TimeoutError: nothing came for ``idle_s``. OSError: either end is gone.
    """
    loop = asyncio.get_running_loop()
    left_bytes = most_bytes
    while left_bytes > 0:
        async with asyncio.timeout(idle_s):
            chunk = await loop.sock_recv(source, int(min(left_bytes, CHUNK_BYTES)))
        if not chunk:
            sink.shutdown(socket.SHUT_WR)
            break
        left_bytes -= len(chunk)
        await loop.sock_sendall(sink, chunk)
        await asyncio.sleep(0)  # where both ends are always ready, others have their turn, too
    return left_bytes
