"""A long, narrow, unreliable link as a TCP proxy on this machine.

Stands between a peer and its hub without either knowing: bytes are never looked at, so TLS
works through it. One link is shared by all connections, a line each way:

    read -> wait for the line (rate) -> in flight (delay + jitter) -> write

What it refuses to model: loss (TCP would show it as delay) and the round trip of connecting.
What is under way is bounded per connection and direction; beyond that nothing is read, and
TCP's own flow control slows the sender down.
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
from typing import Final

from node.clock import Clock, SystemClock
from node.exit_code import ExitCode
from node.rpc.address import join_address, split_address, split_target
from node.telemetry.logging import configure_logging

logger = logging.getLogger(__name__)

EXAMPLE: Final = """\
  python -m deploy.demo.link_emulator --listen 127.0.0.1:7790 --target hub:7700 --delay-ms 100 --rate-mbit 8
  then start the peer with --coordinator 127.0.0.1:7790
"""

PIECE_BYTES: Final = 16 << 10
"""Largest piece put on the line at once: 13 ms at 10 Mbit/s, so that connections share it fairly."""

UNDER_WAY_BYTES: Final = 256 << 10
"""Bound per connection and direction: the window TCP would open on such a path."""

CONNECTIONS: Final = 256
"""Connections at once; one more is closed as it comes."""

CONNECT_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """What a link does to bytes, the same in both directions."""

    delay_s: float = 0.0
    """Time in flight one way: half of what it adds to a round trip."""
    jitter_s: float = 0.0
    """Up to this much is added to the delay, uniformly; order is kept."""
    rate_bytes_per_s: float | None = None
    """None: the line takes any number of bytes at once."""


class Line:
    """One direction of a link: decides when each piece comes out at the far end.

    A token bucket that holds PIECE_BYTES, written as a timeline: the line is busy until
    ``_free_at_s``, which lags behind now by no more than the bucket.
    """

    def __init__(self, profile: LinkProfile) -> None:
        self._profile = profile
        self._free_at_s = float("-inf")
        self._last_arrival_s = float("-inf")

    def arrival(self, size_bytes: int, *, now: float, jitter: float) -> float:
        """Put a piece on the line and give the time it arrives, never before the piece ahead of it.

        Args:
            size_bytes: Of the piece.
            now: Monotonic seconds; must not go back from call to call.
            jitter: Share of ``jitter_s`` that is added, in [0, 1], drawn by the caller.
        """
        departure_s = now
        if self._profile.rate_bytes_per_s is not None:
            full_bucket_s = PIECE_BYTES / self._profile.rate_bytes_per_s
            busy_s = size_bytes / self._profile.rate_bytes_per_s
            self._free_at_s = max(self._free_at_s, now - full_bucket_s) + busy_s
            departure_s = max(now, self._free_at_s)
        arrival_s = departure_s + self._profile.delay_s + jitter * self._profile.jitter_s
        self._last_arrival_s = max(self._last_arrival_s, arrival_s)
        return self._last_arrival_s


class LinkEmulator:
    """Accepts connections and carries each to the target over one emulated link."""

    def __init__(
        self, *, target: tuple[str, int], profile: LinkProfile, clock: Clock, random_source: random.Random
    ) -> None:
        self._target = target
        self._up = Line(profile)
        self._down = Line(profile)
        self._clock = clock
        self._random = random_source
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def connections(self) -> int:
        """Connections open now."""
        return len(self._connections)

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Begin to accept. Closing the server leaves open connections to ``cut``."""
        return await asyncio.start_server(self._accept, host, port, limit=PIECE_BYTES)

    async def cut(self) -> int:
        """Break every connection, without a goodbye and losing what is in flight; give their number."""
        broken = list(self._connections)
        for connection in broken:
            connection.cancel()
        await asyncio.gather(*broken, return_exceptions=True)
        return len(broken)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= CONNECTIONS:
            logger.warning("connection refused, too many", extra={"limit": CONNECTIONS})
            writer.transport.abort()
            return
        connection = asyncio.create_task(self._carry(reader, writer), name="link connection")
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _carry(self, near_reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                far_reader, far = await asyncio.open_connection(*self._target, limit=PIECE_BYTES)
        except OSError as error:
            logger.info("target unreachable", extra={"target": self._target, "error": str(error)})
            near.transport.abort()
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._direct(self._up, near_reader, far))
                group.create_task(self._direct(self._down, far_reader, near))
            near.close()
            far.close()
        except* OSError as broken:
            logger.info("connection broke", extra={"error": str(broken.exceptions[0])})
        finally:
            for end in (near, far):
                if not end.is_closing():
                    end.transport.abort()

    async def _direct(self, line: Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one direction to its end: bytes, then the end of the stream."""
        flight = _Flight()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._depart(line, reader, flight))
            group.create_task(self._arrive(flight, writer))

    async def _depart(self, line: Line, reader: asyncio.StreamReader, flight: "_Flight") -> None:
        at_end = False
        while not at_end:
            await flight.has_room.wait()
            piece = await reader.read(PIECE_BYTES)
            at_end = not piece
            now = self._clock.monotonic()
            flight.push(line.arrival(len(piece), now=now, jitter=self._random.random()), piece)

    async def _arrive(self, flight: "_Flight", writer: asyncio.StreamWriter) -> None:
        while True:
            await flight.has_pieces.wait()
            arrival_s, piece = flight.pop()
            await asyncio.sleep(arrival_s - self._clock.monotonic())
            flight.landed(len(piece))
            if not piece:
                writer.write_eof()
                return
            writer.write(piece)
            await writer.drain()


class _Flight:
    """Pieces under way in one direction of one connection, oldest first; the empty one ends them."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._bytes = 0
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.has_pieces = asyncio.Event()

    def push(self, arrival_s: float, piece: bytes) -> None:
        self._pieces.append((arrival_s, piece))
        self._bytes += len(piece)
        self.has_pieces.set()
        if self._bytes > UNDER_WAY_BYTES - PIECE_BYTES:
            self.has_room.clear()

    def pop(self) -> tuple[float, bytes]:
        oldest = self._pieces.popleft()
        if not self._pieces:
            self.has_pieces.clear()
        return oldest

    def landed(self, size_bytes: int) -> None:
        self._bytes -= size_bytes
        if self._bytes <= UNDER_WAY_BYTES - PIECE_BYTES:
            self.has_room.set()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``heterorl-node emulate-link``."""
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
        ("--rate-mbit", "MBIT/S", "rate of the line, each way; 0: no limit"),
        ("--cut-every-s", "S", "break all connections this often; 0: never"),
    ):
        parser.add_argument(flag, type=_amount, default=0.0, metavar=unit, help=text)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the jitter")


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
        target=arguments.target,
        profile=LinkProfile(
            delay_s=arguments.delay_ms / 1e3,
            jitter_s=arguments.jitter_ms / 1e3,
            rate_bytes_per_s=arguments.rate_mbit * 1e6 / 8 or None,
        ),
        clock=SystemClock(),
        random_source=random.Random(arguments.seed),
    )
    async with await emulator.listen(*arguments.listen) as server:
        print(f"listening on {join_address(*server.sockets[0].getsockname()[:2])}", flush=True)
        while not stopping.is_set():
            try:
                async with asyncio.timeout(arguments.cut_every_s or None):
                    await stopping.wait()
            except TimeoutError:
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
