"""A relay's port: connections to the coordinator, passed on unbroken, and those to the relay itself.

    sampler --TLS hello: which name?--> "hub"   --> the coordinator that the relay's own membership is at
                                    |-> "relay" --> this relay's server of weights, on a private socket
                                    '-> another --> closed, counted as ``malformed``

TLS is between a sampler and whom it asked for: the relay reads the name in the hello, can read nothing else,
and cannot pose as the coordinator. Where the relay's membership moves on to another coordinator, connections
to the one before are closed, and their samplers come again.

A connection is a stranger's until it is older than a handshake may take, since a hub closes it by then unless
it belongs to a member. Strangers share the places that members leave free, and displace each other alone.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from node.errors import CountRefusal, Reason, RefusedError
from node.identity.peer import server_name
from node.relay.metrics import RelayMetrics
from node.rpc.address import split_target
from node.rpc.hub import Hub
from node.rpc.strangers.client_hello import MOST_BYTES, server_name_in
from node.rpc.strangers.entrance import Entrance
from node.rpc.strangers.exchange import CHUNK_BYTES, exchange
from node.rpc.strangers.places import PlaceLimits, Places
from node.rpc.strangers.private_socket import PrivateSocket
from node.system import descriptors
from node.values.roles import Role

SERVICE: Final = "splice"
"""Under which refusals of connections are counted."""

DESCRIPTORS_PER_CONNECTION: Final = 3
"""A connection that is served here takes three; one that is passed on takes two."""

_PROBES: Final = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""When the kernel looks for an end that has vanished. Both ends send pings through the relay and find that
out sooner; this is for the case that both have gone."""


@dataclass(frozen=True, slots=True)
class SpliceLimits:
    """Bounds on the connections to a relay."""

    places: PlaceLimits
    hello_s: float = 10.0
    """Longest wait for a client's hello."""
    settled_s: float = 15.0
    """Age after which a connection is a member's: a hub ends handshakes after 10 s."""
    connect_s: float = 10.0
    """Longest a connection to the coordinator may take."""
    half_open_s: float = 30.0
    """Longest that one direction goes on after the other has ended."""


def limits_for(most_descriptors: int) -> SpliceLimits:
    """Return limits that leave the relay its own files and its reserve."""
    room = most_descriptors - descriptors.OWN_FILES - descriptors.reserve(most_descriptors)
    connections = max(16, room // DESCRIPTORS_PER_CONNECTION)
    return SpliceLimits(
        PlaceLimits(
            connections,
            per_address=max(8, connections // 4),
            kept_s=5.0,
            settled_per_address=max(8, connections // 2),
        )
    )


class Splice:
    """Takes a relay's connections in; used on the event loop's thread."""

    def __init__(
        self,
        hub: Hub,
        *,
        run_id: str,
        metrics: RelayMetrics,
        count_refusal: CountRefusal,
        limits: SpliceLimits | None = None,
    ) -> None:
        """Pass connections on to where ``hub`` is, as the relay's membership moves it."""
        self._hub = hub
        self._coordinator_name = server_name(run_id, Role.COORDINATOR)
        self._relay_name = server_name(run_id, Role.RELAY)
        self._limits = limits or limits_for(descriptors.limit())
        self._places = Places["asyncio.Task[None]"](self._limits.places)
        self._entrance = Entrance(SERVICE, self._places, count_refusal=count_refusal)
        self._coordinator_of: dict[asyncio.Task[None], str] = {}
        """Connections that are passed on -> the address of the coordinator they lead to."""
        metrics.watch_connections(
            passed_on=lambda: len(self._coordinator_of),
            served_here=lambda: len(self._places) - len(self._coordinator_of),
            limit=self._limits.places.connections,
        )
        hub.watch(self._end_those_elsewhere)

    @contextlib.asynccontextmanager
    async def open(self, listen: str, inner: PrivateSocket) -> AsyncIterator[str]:
        """Take connections in while the body runs; yield the address with its port.

        Those for the relay itself go to the socket ``inner``. Raises OSError: the address cannot be bound.
        """
        async with self._entrance.open(listen, partial(self._serve, inner)) as address:
            yield address

    async def _serve(self, inner: PrivateSocket, client: socket.socket, caller: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        settling = asyncio.get_running_loop().call_later(self._limits.settled_s, self._places.settle, task)
        _probe(client)
        try:
            async with asyncio.timeout(self._limits.hello_s):
                name, hello = await _hello(client)
            if name == self._relay_name:
                with await inner.connect(caller) as server:
                    await self._pass_on(hello, client, server)
            elif name == self._coordinator_name:
                self._coordinator_of[task] = self._hub.address
                with await self._connected(self._hub.address) as server:
                    await self._pass_on(hello, client, server)
            else:
                raise RefusedError(
                    Reason.MALFORMED,
                    f"a connection for {name[:100]!r}, this is a relay of another run",
                    fix="check the address",
                )
        finally:
            settling.cancel()
            self._coordinator_of.pop(task, None)

    async def _pass_on(self, hello: bytes, client: socket.socket, server: socket.socket) -> None:
        await exchange(client, server, first=hello, half_open_s=self._limits.half_open_s)

    async def _connected(self, address: str) -> socket.socket:
        """Connect to a coordinator, straight. Raises RefusedError: BUSY; it is not reached."""
        loop = asyncio.get_running_loop()
        host, port = split_target(address)
        why: OSError | None = None
        try:
            async with asyncio.timeout(self._limits.connect_s):
                for family, kind, protocol, _, where in await loop.getaddrinfo(
                    host, port, type=socket.SOCK_STREAM
                ):
                    server = socket.socket(family, kind, protocol)
                    try:
                        server.setblocking(False)
                        await loop.sock_connect(server, where)
                        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        _probe(server)
                    except OSError as error:
                        server.close()
                        why = error
                    except BaseException:
                        server.close()
                        raise
                    else:
                        return server
        except (OSError, TimeoutError) as error:
            why = error
        raise RefusedError(Reason.BUSY, f"the coordinator is not reached at {address}: {why}") from why

    def _end_those_elsewhere(self) -> None:
        for task, address in self._coordinator_of.items():
            if address != self._hub.address:
                task.cancel()


async def _hello(client: socket.socket) -> tuple[str, bytes]:
    """Return the name that a client asks for, and what was read for that.

    Raises RefusedError: MALFORMED; it does not begin as TLS does.
    """
    received = b""
    while len(received) < MOST_BYTES:
        chunk = await asyncio.get_running_loop().sock_recv(client, CHUNK_BYTES)
        if not chunk:
            raise ConnectionResetError("gone before its hello")
        received += chunk
        try:
            name = server_name_in(received)
        except ValueError as error:
            raise RefusedError(Reason.MALFORMED, str(error), fix="peers use TLS with a relay") from error
        if name is not None:
            return name, received
    raise RefusedError(Reason.MALFORMED, f"no hello in {len(received)} bytes")


def _probe(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _PROBES:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
