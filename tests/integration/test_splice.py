"""A relay's port: connections to the coordinator pass unbroken, within bounds; the others are its own."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from prometheus_client import CollectorRegistry

from heterorl.v1 import common_pb2
from node.errors import Reason, RefusedError
from node.relay.metrics import RelayMetrics
from node.relay.splice import Splice, SpliceLimits, limits_for
from node.rpc.address import join_address
from node.rpc.call_ends import ConnectionLost
from node.rpc.hub import Hub
from node.rpc.strangers.places import PlaceLimits
from node.rpc.strangers.private_socket import PrivateSocket, private_socket
from support.client_hello import client_hello
from support.hub import joined
from support.identity import MadeRun
from support.relay import running_relay
from support.waiting import until

FEW = PlaceLimits(connections=4, per_address=4, kept_s=0.0)
TO_COORDINATOR, TO_RELAY = client_hello("hub.run.heterorl"), client_hello("relay.run.heterorl")


class End:
    """A server that takes connections and does what a test tells it to."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        listener.setblocking(False)
        self.address = ""
        if listener.family == socket.AF_INET:
            self.address = join_address(*listener.getsockname())
        self.connections: list[socket.socket] = []

    async def accept(self) -> socket.socket:
        connection, _ = await asyncio.get_running_loop().sock_accept(self.listener)
        self.connections.append(connection)
        return connection


@contextlib.contextmanager
def an_end(inner: PrivateSocket | None = None) -> Iterator[End]:
    with socket.socket(socket.AF_INET if inner is None else socket.AF_UNIX) as listener:
        listener.bind(("127.0.0.1", 0) if inner is None else inner.path)
        listener.listen()
        end = End(listener)
        yield end
        for connection in end.connections:
            connection.close()


class Opened:
    """A splice between two servers of a test."""

    def __init__(self, hub: Hub, coordinator: End, relay: End, limits: SpliceLimits) -> None:
        self.hub, self.coordinator, self.relay = hub, coordinator, relay
        self.registry = CollectorRegistry()
        self.refusals: list[Reason] = []
        self.splice = Splice(
            hub,
            run_id="run",
            metrics=RelayMetrics(self.registry),
            count_refusal=lambda *, service, reason: self.refusals.append(reason),
            limits=limits,
        )
        self.address = ""
        self.clients = contextlib.ExitStack()

    async def dial(self, first: bytes) -> socket.socket:
        client = self.clients.enter_context(socket.socket())
        client.setblocking(False)
        host, port = self.address.split(":")
        await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
        await asyncio.get_running_loop().sock_sendall(client, first)
        return client

    async def connect(self) -> tuple[socket.socket, socket.socket]:
        """Return the two ends of a connection to the coordinator, whose hello has been read."""
        client = await self.dial(TO_COORDINATOR)
        server = await self.coordinator.accept()
        assert await received(server, len(TO_COORDINATOR)) == TO_COORDINATOR
        return client, server

    def number(self, to: str) -> float | None:
        return self.registry.get_sample_value("heterorl_relay_connections", {"to": to})


@asynccontextmanager
async def opened(places: PlaceLimits = FEW, **limits: Any) -> AsyncIterator[Opened]:
    with private_socket() as inner, an_end() as coordinator, an_end(inner) as relay:
        it = Opened(Hub(coordinator.address), coordinator, relay, SpliceLimits(places, **limits))
        async with it.splice.open("127.0.0.1:0", inner) as it.address:
            with it.clients:
                yield it


async def received(connection: socket.socket, size_bytes: int) -> bytes:
    data = b""
    while len(data) < size_bytes:
        chunk = await asyncio.get_running_loop().sock_recv(connection, size_bytes - len(data))
        if not chunk:
            break
        data += chunk
    return data


async def is_closed(connection: socket.socket) -> bool:
    try:
        return await asyncio.get_running_loop().sock_recv(connection, 1) == b""
    except ConnectionResetError:
        return True


async def test_a_sampler_speaks_with_the_coordinator_through_a_relay_and_with_the_relay_itself(
    made: MadeRun, tmp_path: Path
) -> None:
    async with (
        joined(made) as (hub, learner, sampler),
        running_relay(made, tmp_path / "relay", coordinator=hub.address) as relay,
        relay.peer() as behind,
    ):
        drain = await learner.drain(credits=1)
        (lease,) = (await sampler.lease()).leases
        assert (await behind.submit(lease)).verdict == common_pb2.VERDICT_SPOOLED
        delivered = (await drain.hear()).group
        assert (delivered.group_id, delivered.sampler_id) == (lease.lease_id, "sampler-1")
        assert relay.registry.value("heterorl_relay_connections", to="coordinator") == 1


async def test_what_a_connection_begins_with_says_where_it_leads_and_all_of_it_arrives() -> None:
    async with opened() as it:
        for hello, end in ((TO_COORDINATOR, it.coordinator), (TO_RELAY, it.relay)):
            client = await it.dial(hello + b"more")
            server = await end.accept()
            assert await received(server, len(hello) + 4) == hello + b"more"
            await asyncio.get_running_loop().sock_sendall(server, b"answer")
            assert await received(client, 6) == b"answer"
            client.close()
            assert await is_closed(server)
            server.close()
        await until(lambda: (it.number("coordinator"), it.number("relay")) == (0, 0))


async def test_a_hello_may_come_in_pieces() -> None:
    async with opened() as it:
        client = await it.dial(TO_COORDINATOR[:7])
        await asyncio.get_running_loop().sock_sendall(client, TO_COORDINATOR[7:])
        assert await received(await it.coordinator.accept(), len(TO_COORDINATOR)) == TO_COORDINATOR
        client.close()


@pytest.mark.parametrize(
    "first", [b"GET / HTTP/1.1\r\n", client_hello("hub.another.heterorl"), client_hello(None)]
)
async def test_what_is_not_for_this_run_is_closed_and_counted(first: bytes) -> None:
    async with opened() as it:
        assert await is_closed(await it.dial(first))
        assert it.refusals == [Reason.MALFORMED]


async def test_who_says_nothing_is_closed_and_counted() -> None:
    async with opened(hello_s=0.05) as it:
        assert await is_closed(await it.dial(b""))
        assert it.refusals == [Reason.BUSY]


async def test_a_receiver_that_is_slow_holds_up_its_sender() -> None:
    async with opened() as it:
        client = await it.dial(TO_COORDINATOR)
        server = await it.coordinator.accept()
        loop, sent = asyncio.get_running_loop(), 0

        async def send() -> None:
            nonlocal sent
            while True:
                await loop.sock_sendall(client, bytes(1 << 16))
                sent += 1 << 16

        sending = asyncio.create_task(send())
        before = -1
        while before != sent:  # until the kernel's buffers are full
            before = sent
            await asyncio.sleep(0.1)
        await received(server, len(TO_COORDINATOR) + sent)
        await until(lambda: sent > before)
        sending.cancel()
        client.close()


async def test_what_was_said_last_arrives_before_the_connection_is_closed() -> None:
    async with opened() as it:
        client, server = await it.connect()
        loop, answer = asyncio.get_running_loop(), bytes(16 << 20)
        answering = asyncio.create_task(loop.sock_sendall(server, answer))
        client.shutdown(socket.SHUT_WR)
        assert await is_closed(server)
        assert len(await received(client, 1 << 16)) == 1 << 16
        answering.add_done_callback(lambda _: server.shutdown(socket.SHUT_WR))
        assert len(await received(client, 16 << 20)) == (16 << 20) - (1 << 16)
        await until(lambda: it.number("coordinator") == 0)


async def test_an_end_that_breaks_off_ends_the_other_at_once() -> None:
    async with opened() as it:
        client, server = await it.connect()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        server.close()
        assert await is_closed(client)
        await until(lambda: it.number("coordinator") == 0)


async def test_one_direction_may_end_before_the_other_and_not_for_long() -> None:
    async with opened(half_open_s=0.2) as it:
        client, server = await it.connect()
        client.shutdown(socket.SHUT_WR)
        assert await is_closed(server)
        await asyncio.get_running_loop().sock_sendall(server, b"late")
        assert await received(client, 4) == b"late"
        assert await is_closed(client)  # after half_open_s


@pytest.mark.parametrize(
    "test",
    [
        test_what_a_connection_begins_with_says_where_it_leads_and_all_of_it_arrives,
        test_a_receiver_that_is_slow_holds_up_its_sender,
        test_what_was_said_last_arrives_before_the_connection_is_closed,
        test_an_end_that_breaks_off_ends_the_other_at_once,
    ],
)
def test_a_daemons_loop_copies_the_same(test: Callable[[], Coroutine[None, None, None]]) -> None:
    uvloop.run(test())


async def test_a_coordinator_that_is_not_reached_is_busy_and_the_next_connection_finds_it() -> None:
    async with opened() as it:
        it.coordinator.listener.close()
        assert await is_closed(await it.dial(TO_COORDINATOR))
        assert it.refusals == [Reason.BUSY]


async def test_connections_go_where_the_relays_membership_is_and_those_to_another_coordinator_end() -> None:
    async with opened() as it:
        with an_end() as second:
            hub = Hub(f"{it.coordinator.address},{second.address}")
            both = Opened(hub, it.coordinator, it.relay, SpliceLimits(FEW))
            with private_socket() as inner:
                async with both.splice.open("127.0.0.1:0", inner) as both.address:
                    it.clients.enter_context(both.clients)
                    first = await both.dial(TO_COORDINATOR)
                    await it.coordinator.accept()
                    hub.move_on_after(RefusedError(Reason.STANDBY, "another coordinator leads"))
                    assert await is_closed(first)
                    again = await both.dial(TO_COORDINATOR)
                    assert await received(await second.accept(), 5) == TO_COORDINATOR[:5]
                    hub.move_on_after(ConnectionLost("cut"))
                    assert await is_closed(again)


async def test_strangers_displace_each_other_and_nobody_who_has_settled() -> None:
    async with opened(settled_s=0.05) as it:
        members = [await it.dial(TO_COORDINATOR) for _ in range(3)]
        servers = [await it.coordinator.accept() for _ in members]
        await asyncio.sleep(0.2)
        strangers = [await it.dial(b"") for _ in range(2)]
        assert await is_closed(strangers[0])
        assert it.refusals == [Reason.BUSY]
        for member, server in zip(members, servers, strict=True):
            await received(server, len(TO_COORDINATOR))
            await asyncio.get_running_loop().sock_sendall(member, b"on")
        assert {await received(server, 2) for server in servers} == {b"on"}


def test_a_relay_leaves_itself_descriptors() -> None:
    for most in (128, 1024, 65_536, 1 << 20):
        places = limits_for(most).places
        assert places.connections >= 16
        assert places.connections * 3 < most or most == 128
        assert places.per_address < places.settled_per_address < places.connections or most == 128
