"""A plain connection to a hub on the way that gRPC takes, for a look at where that ends."""

import asyncio
import os
import ssl
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final
from urllib.parse import unquote

from node.rpc.address import join_address, split_target
from node.rpc.proxy import Proxy

TIMEOUT_S: Final = 10.0
"""For a connection, with its handshake, to be there."""

CLOSE_S: Final = 1.0


@asynccontextmanager
async def connected(
    host: str, port: int, proxy: Proxy | None = None, *, tls: ssl.SSLContext | None = None, name: str = ""
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect, by ``proxy`` where there is one; with ``tls``, shake hands with the server ``name``.

    Raises OSError, EOFError, ValueError: it or the proxy does not answer, or not as it should.
    """
    reader, writer = await asyncio.open_connection(*(split_target(proxy.address) if proxy else (host, port)))
    try:
        if proxy is not None:
            await _ask_for_way(reader, writer, join_address(host, port), proxy)
        if tls is not None:
            await writer.start_tls(tls, server_hostname=name)
        yield reader, writer
    finally:
        writer.transport.abort()
        # A handshake that was given up does not say when its connection has ended.
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await writer.wait_closed()


async def _ask_for_way(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str, proxy: Proxy
) -> None:
    lines = [f"CONNECT {address} HTTP/1.1", f"Host: {address}"]
    if proxy.authorization:
        said = b64encode(unquote(proxy.authorization).encode()).decode()
        lines.append(f"Proxy-Authorization: Basic {said}")
    writer.write("\r\n".join((*lines, "", "")).encode())
    answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status = answer.partition("\r\n")[0]
    if status.split(" ")[1:2] != ["200"]:
        raise ValueError(f"the proxy answers {status[:200]!r}")


def reason_of(error: Exception) -> str:
    """Return why a connection failed; an error's own text may be empty."""
    if isinstance(error, TimeoutError):
        return f"no answer within {TIMEOUT_S:g} s"
    if isinstance(error, EOFError):
        return "the connection was closed without an answer"
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno)  # asyncio's own text is "Connect call failed" whatever the cause
    return str(error) or type(error).__name__
