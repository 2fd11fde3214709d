"""Emulates a long, narrow, unreliable link with a TCP proxy on this machine.

It stands between a peer and its hub and never looks at the bytes, so TLS works through it. All connections
share one link, whose two directions are independent:

    read -> wait for the link (rate) -> in flight (delay + jitter) -> write

Loss (TCP would show it as delay) and the round trip of connecting are not modelled. The bytes in flight are
bounded per connection and direction, by what fills the link at least; beyond that nothing is read, and TCP's
flow control slows the sender.
"""

import argparse
import asyncio
import logging
import random
import signal
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from node.exit_code import ExitCode
from node.rpc.address import join_address, split_address, split_target
from node.system.clock import Clock, SystemClock
from node.system.waits import wait_at_most
from node.telemetry.logging import configure_logging

logger = logging.getLogger(__name__)

EXAMPLE: Final = """\
  python -m deploy.demo.link_emulator --listen 127.0.0.1:7790 --target hub:7700 --delay-ms 100 --rate-mbit 8
  then start the peer with --coordinator 127.0.0.1:7790
"""

CHUNK_BYTES: Final = 16 << 10
"""Largest chunk sent at once: 13 ms at 10 Mbit/s, so that connections share the link fairly."""

IN_FLIGHT_BYTES: Final = 256 << 10
"""Smallest bound per connection and direction; a link that holds more in flight has twice what it holds."""

CONNECTIONS: Final = 256
"""Connections at once; any more are closed at once."""

CONNECT_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """Delay, jitter and rate of a link, the same in both directions."""

    delay_s: float = 0.0
    """Time in flight one way: half of the round trip."""
    jitter_s: float = 0.0
    """Up to this much is added to the delay, uniformly; order is kept."""
    rate_bytes_per_s: float | None = None
    """None: no limit."""

    @property
    def window_bytes(self) -> int:
        """Bound on the bytes in flight of a connection, as TCP would open it."""
        held = (self.rate_bytes_per_s or 0.0) * (self.delay_s + self.jitter_s)
        return max(IN_FLIGHT_BYTES, int(2 * held))


class LinkDirection:
    """One direction of a link: computes when each chunk arrives at the far end.

    A token bucket of CHUNK_BYTES, written as a timeline: the link is busy until
    ``_free_at_s``, which lags behind now by no more than the bucket.
    """

    def __init__(self, profile: LinkProfile) -> None:
        self._profile = profile
        self._free_at_s = float("-inf")
        self._last_arrival_s = float("-inf")
        self.carried_bytes = 0
        """Sent so far, on all connections."""

    def arrival(self, size_bytes: int, *, now: float, jitter: float) -> float:
        """Send a chunk and return the time it arrives, never before the chunk ahead of it.

        Args:
            size_bytes: of the chunk.
            now: monotonic seconds; must not go back from call to call.
            jitter: share of ``jitter_s`` that is added, in [0, 1], drawn by the caller.
        """
        self.carried_bytes += size_bytes
        departure_s = now
        if self._profile.rate_bytes_per_s is not None:
            full_bucket_s = CHUNK_BYTES / self._profile.rate_bytes_per_s
            busy_s = size_bytes / self._profile.rate_bytes_per_s
            self._free_at_s = max(self._free_at_s, now - full_bucket_s) + busy_s
            departure_s = max(now, self._free_at_s)
        arrival_s = departure_s + self._profile.delay_s + jitter * self._profile.jitter_s
        self._last_arrival_s = max(self._last_arrival_s, arrival_s)
        return self._last_arrival_s


class LinkEmulator:
    """Accepts connections and carries each to its target; all of them share one emulated link."""

    def __init__(self, *, profile: LinkProfile, clock: Clock, random_source: random.Random) -> None:
        self._window_bytes = profile.window_bytes
        self.up = LinkDirection(profile)
        self.down = LinkDirection(profile)
        self._clock = clock
        self._random = random_source
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def connections(self) -> int:
        """Connections open now."""
        return len(self._connections)

    async def listen(self, host: str, port: int, *, target: tuple[str, int]) -> asyncio.Server:
        """Start to accept connections to ``target``. Closing the server leaves open ones to ``cut``."""
        accept = partial(self._accept, target)
        return await asyncio.start_server(accept, host, port, limit=CHUNK_BYTES)

    async def cut(self) -> int:
        """Abort every connection and drop the bytes in flight; return the number of connections."""
        broken = list(self._connections)
        for connection in broken:
            connection.cancel()
        await asyncio.gather(*broken, return_exceptions=True)
        return len(broken)

    def _accept(
        self, target: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if len(self._connections) >= CONNECTIONS:
            logger.warning("connection refused, too many", extra={"limit": CONNECTIONS})
            writer.transport.abort()
            return
        connection = asyncio.create_task(self._carry(target, reader, writer), name="link connection")
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _carry(
        self, target: tuple[str, int], near_reader: asyncio.StreamReader, near: asyncio.StreamWriter
    ) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                far_reader, far = await asyncio.open_connection(*target, limit=CHUNK_BYTES)
        except OSError as error:
            logger.info("target unreachable", extra={"target": target, "error": str(error)})
            near.transport.abort()
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._direct(self.up, near_reader, far))
                group.create_task(self._direct(self.down, far_reader, near))
            near.close()
            far.close()
        except* OSError as broken:
            logger.info("connection broke", extra={"error": str(broken.exceptions[0])})
        finally:
            for end in (near, far):
                if not end.is_closing():
                    end.transport.abort()

    async def _direct(
        self, link: LinkDirection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Carry one direction until the end of its stream."""
        flight = _InFlight(self._window_bytes)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._depart(link, reader, flight))
            group.create_task(self._arrive(flight, writer))

    async def _depart(self, link: LinkDirection, reader: asyncio.StreamReader, flight: "_InFlight") -> None:
        at_end = False
        while not at_end:
            await flight.has_room.wait()
            chunk = await reader.read(CHUNK_BYTES)
            at_end = not chunk
            now = self._clock.monotonic()
            flight.push(link.arrival(len(chunk), now=now, jitter=self._random.random()), chunk)

    async def _arrive(self, flight: "_InFlight", writer: asyncio.StreamWriter) -> None:
        while True:
            await flight.has_chunks.wait()
            arrival_s, chunk = flight.pop()
            await asyncio.sleep(arrival_s - self._clock.monotonic())
            flight.landed(len(chunk))
            if not chunk:
                writer.write_eof()
                return
            writer.write(chunk)
            await writer.drain()


class _InFlight:
    """Chunks in flight in one direction of one connection, oldest first; an empty one ends the stream."""

    def __init__(self, window_bytes: int) -> None:
        self._most_bytes = window_bytes - CHUNK_BYTES
        self._chunks: deque[tuple[float, bytes]] = deque()
        self._bytes = 0
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.has_chunks = asyncio.Event()

    def push(self, arrival_s: float, chunk: bytes) -> None:
        self._chunks.append((arrival_s, chunk))
        self._bytes += len(chunk)
        self.has_chunks.set()
        if self._bytes > self._most_bytes:
            self.has_room.clear()

    def pop(self) -> tuple[float, bytes]:
        oldest = self._chunks.popleft()
        if not self._chunks:
            self.has_chunks.clear()
        return oldest

    def landed(self, size_bytes: int) -> None:
        self._bytes -= size_bytes
        if self._bytes <= self._most_bytes:
            self.has_room.set()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument(
        "--listen",
        type=_parsed_by(split_address),
        default=("127.0.0.1", 0),
        metavar="HOST:PORT",
        help="where peers connect; port 0 takes any; default: 127.0.0.1:0",
    )
    parser.add_argument(
        "--target",
        type=_parsed_by(split_target),
        required=True,
        metavar="HOST:PORT",
        help="where the hub listens",
    )
    for flag, unit, text in (
        ("--delay-ms", "MS", "time in flight, one way"),
        ("--jitter-ms", "MS", "added to the delay at random, at most"),
        ("--rate-mbit", "MBIT/S", "rate of the link, each way; 0: no limit"),
        ("--cut-every-s", "S", "break all connections this often; 0: never"),
    ):
        parser.add_argument(flag, type=_amount, default=0.0, metavar=unit, help=text)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the jitter")


def run(arguments: argparse.Namespace) -> int:
    """Carry connections until SIGTERM or SIGINT."""
    configure_logging(log_format="auto", level="info", roles=["link"])
    return asyncio.run(_serve(arguments))


async def _serve(arguments: argparse.Namespace) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    emulator = LinkEmulator(
        profile=LinkProfile(
            delay_s=arguments.delay_ms / 1e3,
            jitter_s=arguments.jitter_ms / 1e3,
            rate_bytes_per_s=arguments.rate_mbit * 1e6 / 8 or None,
        ),
        clock=SystemClock(),
        random_source=random.Random(arguments.seed),
    )
    async with await emulator.listen(*arguments.listen, target=arguments.target) as server:
        print(f"listening on {join_address(*server.sockets[0].getsockname()[:2])}", flush=True)
        while not stopping.is_set():
            await wait_at_most(stopping, arguments.cut_every_s or None)
            if not stopping.is_set():
                logger.warning("link cut", extra={"connections": await emulator.cut()})
        server.close()
        await emulator.cut()
    return ExitCode.DRAINED


def _parsed_by(split: Callable[[str], tuple[str, int]]) -> Callable[[str], tuple[str, int]]:
    def address(text: str) -> tuple[str, int]:
        try:
            return split(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return address


def _amount(text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = -1.0
    if not 0 <= amount < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1e9")
    return amount


def main() -> int:
    """Run the emulator until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.demo.link_emulator",
        description="Put a long, narrow, unreliable link between a peer and the address it dials.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"example:\n{EXAMPLE}",
    )
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
