"""Attacks on a node's ports by callers without a certificate, and by members that are clumsy or hostile.

Plain asyncio without pytest, so that benches may use them. A context manager keeps up its attack while its
body runs.
"""

import asyncio
import collections
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import grpc.aio

from node.rpc.address import split_address
from node.rpc.call_ends import REASON_KEY

CONNECT_TIMEOUT_S: Final = 5.0


def handshake_without_certificate() -> ssl.SSLContext:
    """Return a context that accepts any server and shows no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


class Held:
    """Connections that an attacker holds."""

    def __init__(self) -> None:
        self._connections: list[tuple[asyncio.Task[None], asyncio.StreamWriter]] = []
        self.refused = 0
        """Attempts that did not lead to a connection."""

    def add(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.append((asyncio.create_task(_wait_for_end(reader)), writer))

    @property
    def open(self) -> int:
        """How many the server has not closed."""
        return sum(not ended.done() for ended, _ in self._connections)

    def close(self) -> None:
        for ended, writer in self._connections:
            ended.cancel()
            writer.transport.abort()


async def _wait_for_end(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(4096):
            pass


@contextlib.asynccontextmanager
async def hold_idle_connections(address: str, number: int, *, tls: bool = True) -> AsyncIterator[Held]:
    """Hold connections that say nothing, after the TLS handshake or, without ``tls``, before it."""
    host, port = split_address(address)
    context = handshake_without_certificate() if tls else None
    held, at_once = Held(), asyncio.Semaphore(100)

    async def hold_one() -> None:
        try:
            async with at_once, asyncio.timeout(CONNECT_TIMEOUT_S):
                held.add(*await asyncio.open_connection(host, port, ssl=context))
        except (OSError, TimeoutError):
            held.refused += 1

    try:
        await asyncio.gather(*(hold_one() for _ in range(number)))
        yield held
    finally:
        held.close()


async def half_open_calls(channel: grpc.aio.Channel, path: str, number: int) -> "collections.Counter[str]":
    """Make calls that send their headers and no message, until the server ends them; count how they ended."""

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async def call() -> str:
        method: Any = channel.stream_unary(path)
        return await _outcome(method(nothing()))

    return collections.Counter(await asyncio.gather(*(call() for _ in range(number))))


async def gzip_bombs(
    channel: grpc.aio.Channel, path: str, number: int, *, size_bytes: int = 60 << 20
) -> "collections.Counter[str]":
    """Make calls whose message of zeros inflates to a thousand times its size; return how each ended."""
    zeros = bytes(size_bytes)

    async def call() -> str:
        method: Any = channel.unary_unary(path)
        return await _outcome(method(zeros, compression=grpc.Compression.Gzip, timeout=60))

    return collections.Counter(await asyncio.gather(*(call() for _ in range(number))))


async def flood(
    channel: grpc.aio.Channel, path: str, request: bytes, *, number: int, at_once: int = 16
) -> "collections.Counter[str]":
    """Make unary calls as fast as they are answered; return how each ended."""
    turns = asyncio.Semaphore(at_once)

    async def call() -> str:
        async with turns:
            method: Any = channel.unary_unary(path)
            return await _outcome(method(request, timeout=60))

    return collections.Counter(await asyncio.gather(*(call() for _ in range(number))))


@contextlib.asynccontextmanager
async def slow_http_clients(address: str, number: int, *, byte_every_s: float = 3.0) -> AsyncIterator[None]:
    """Keep up clients that send a request a byte at a time, and connect again when they are cut off."""
    host, port = split_address(address)

    async def dribble() -> None:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(host, port)
                try:
                    for byte in b"GET /metrics HTTP/1.1\r\n" + b"X-Header: x\r\n" * 1000:
                        writer.write(bytes((byte,)))
                        await writer.drain()
                        await asyncio.sleep(byte_every_s)
                finally:
                    writer.transport.abort()
            await asyncio.sleep(0.01)

    clients = [asyncio.create_task(dribble()) for _ in range(number)]
    try:
        yield
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def _outcome(call: Any) -> str:
    """Return ``ok``, our reason of the refusal, or gRPC's status."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        trailing = dict(error.trailing_metadata() or ())
        return str(trailing.get(REASON_KEY, error.code().name))
    return "ok"
