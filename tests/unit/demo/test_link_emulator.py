"""Pacing by hand-worked numbers; the proxy over real sockets, with bounds wide enough for a busy machine."""

import argparse
import asyncio
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.demo import link_emulator
from deploy.demo.link_emulator import CHUNK_BYTES, IN_FLIGHT_BYTES, LinkDirection, LinkEmulator, LinkProfile
from node.system.clock import SystemClock

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def test_a_piece_arrives_after_the_delay_and_its_share_of_the_jitter() -> None:
    link = LinkDirection(LinkProfile(delay_s=0.2, jitter_s=0.1))
    assert link.arrival(10_000, now=5.0, jitter=0.5) == pytest.approx(5.25)


def test_an_idle_line_takes_one_bucket_at_once_and_then_keeps_to_its_rate() -> None:
    link = LinkDirection(LinkProfile(rate_bytes_per_s=CHUNK_BYTES))  # one chunk a second
    assert [link.arrival(CHUNK_BYTES, now=7.0, jitter=0.0) for _ in range(3)] == [7.0, 8.0, 9.0]
    assert link.arrival(CHUNK_BYTES, now=8.5, jitter=0.0) == 10.0
    # A long idle line has saved no more than one bucket.
    assert [link.arrival(CHUNK_BYTES, now=1000.0, jitter=0.0) for _ in range(2)] == [1000.0, 1001.0]


@given(
    chunks=st.lists(st.tuples(st.integers(0, CHUNK_BYTES), st.floats(0, 0.5), st.floats(0, 1)), max_size=50),
    rate=st.none() | st.floats(1e3, 1e6),
)
def test_pieces_never_overtake_each_other_nor_heartbeat_the_delay_or_the_rate(
    chunks: list[tuple[int, float, float]], rate: float | None
) -> None:
    link = LinkDirection(LinkProfile(delay_s=0.1, jitter_s=1.0, rate_bytes_per_s=rate))
    now, sent_bytes, arrivals = 0.0, 0, []
    for size_bytes, pause_s, jitter in chunks:
        now += pause_s
        sent_bytes += size_bytes
        arrivals.append(link.arrival(size_bytes, now=now, jitter=jitter))
        assert arrivals[-1] >= now + 0.1
        if rate is not None:
            assert arrivals[-1] - 0.1 + 1e-6 >= (sent_bytes - CHUNK_BYTES) / rate
    assert all(earlier <= later for earlier, later in pairwise(arrivals))


@asynccontextmanager
async def _link(profile: LinkProfile, handler: Handler) -> AsyncIterator[tuple[LinkEmulator, int]]:
    """Return a running emulator and its port, in front of a server that treats connections by ``handler``."""
    async with await asyncio.start_server(handler, "127.0.0.1", 0) as target:
        emulator = LinkEmulator(profile=profile, clock=SystemClock(), random_source=random.Random(0))
        address = target.sockets[0].getsockname()[:2]
        async with await emulator.listen("127.0.0.1", 0, target=address) as server:
            try:
                yield emulator, server.sockets[0].getsockname()[1]
            finally:
                server.close()
                await emulator.cut()


@asynccontextmanager
async def _connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def _is_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether a byte still makes the round trip."""
    try:
        writer.write(b"a")
        return await reader.readexactly(1) == b"a"
    except (ConnectionError, asyncio.IncompleteReadError):
        return False


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(1 << 16):
        writer.write(chunk)
        await writer.drain()
    writer.close()


async def test_bytes_come_back_whole_and_in_order_and_the_end_of_the_stream_with_them() -> None:
    payload = random.Random(1).randbytes(3 * IN_FLIGHT_BYTES)
    profile = LinkProfile(delay_s=0.01, jitter_s=0.02)
    async with asyncio.timeout(30), _link(profile, _echo) as (_, port), _connection(port) as (reader, writer):
        writer.write(payload)
        writer.write_eof()
        assert await reader.read(-1) == payload


async def test_a_transfer_takes_twice_the_delay_and_is_held_to_the_rate() -> None:
    payload = bytes(64 << 10)
    profile = LinkProfile(delay_s=0.1, rate_bytes_per_s=128 << 10)
    async with asyncio.timeout(30), _link(profile, _echo) as (_, port), _connection(port) as (reader, writer):
        started_s = time.monotonic()
        writer.write(payload)
        await reader.readexactly(len(payload))
        # 64 KiB less the bucket of 16 KiB at 128 KiB/s; the two directions work at the same time.
        assert time.monotonic() - started_s >= 0.2 + 0.37


def test_more_is_in_flight_on_a_link_that_holds_more() -> None:
    assert LinkProfile(delay_s=0.01, rate_bytes_per_s=1e6).window_bytes == IN_FLIGHT_BYTES
    assert LinkProfile(delay_s=0.075, rate_bytes_per_s=12.5e6).window_bytes == 1_875_000


async def test_two_targets_share_one_link_which_counts_their_bytes() -> None:
    async with (
        asyncio.timeout(30),
        _link(LinkProfile(), _echo) as (emulator, first),
        await asyncio.start_server(_echo, "127.0.0.1", 0) as other,
        await emulator.listen("127.0.0.1", 0, target=other.sockets[0].getsockname()[:2]) as server,
        _connection(first) as ends,
        _connection(server.sockets[0].getsockname()[1]) as others,
    ):
        assert await _is_up(*ends)
        assert await _is_up(*others)
        assert (emulator.up.carried_bytes, emulator.down.carried_bytes) == (2, 2)


async def test_a_receiver_that_does_not_read_stops_the_sender() -> None:
    profile = LinkProfile(delay_s=30.0)
    async with asyncio.timeout(30), _link(profile, _echo) as (_, port), _connection(port) as (_, writer):
        writer.write(bytes(64 << 20))  # far beyond what the kernel buffers
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await writer.drain()


async def test_a_cut_breaks_connections_and_leaves_room_for_new_ones() -> None:
    async with asyncio.timeout(30), _link(LinkProfile(), _echo) as (emulator, port):
        async with _connection(port) as ends:
            assert await _is_up(*ends)
            assert await emulator.cut() == 1
            assert not await _is_up(*ends)
            assert emulator.connections == 0
        async with _connection(port) as ends:
            assert await _is_up(*ends)


async def test_a_connection_to_an_absent_target_is_closed_at_once() -> None:
    async with asyncio.timeout(30), _link(LinkProfile(), _echo) as (_, spare_port):
        pass
    emulator = LinkEmulator(profile=LinkProfile(), clock=SystemClock(), random_source=random.Random(0))
    async with (
        asyncio.timeout(30),
        await emulator.listen("127.0.0.1", 0, target=("127.0.0.1", spare_port)) as server,
        _connection(server.sockets[0].getsockname()[1]) as ends,
    ):
        assert not await _is_up(*ends)


async def test_one_connection_too_many_is_refused_and_the_rest_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_emulator, "CONNECTIONS", 1)
    async with asyncio.timeout(30), _link(LinkProfile(), _echo) as (_, port), _connection(port) as first:
        assert await _is_up(*first)
        async with _connection(port) as second:
            assert not await _is_up(*second)
        assert await _is_up(*first)


async def test_the_command_says_where_it_listens_cuts_on_schedule_and_ends_with_zero_on_sigterm() -> None:
    async with asyncio.timeout(60), await asyncio.start_server(_echo, "127.0.0.1", 0) as target:
        flags = ("--target", f"127.0.0.1:{target.sockets[0].getsockname()[1]}", "--cut-every-s", "0.3")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "deploy.demo.link_emulator", *flags, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        said = (await process.stdout.readline()).decode()
        assert said.startswith("listening on 127.0.0.1:")
        async with _connection(int(said.rpartition(":")[2])) as (reader, writer):
            assert await _is_up(reader, writer)
            with suppress(ConnectionResetError):  # the cut shows as a reset or as the end
                assert await reader.read(1) == b""
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--target", "nowhere"], "the port is missing"),
        (["--target", "host:70000"], "--target"),
        (["--target", "host:1", "--delay-ms", "-1"], "--delay-ms"),
        (["--target", "host:1", "--rate-mbit", "fast"], "--rate-mbit"),
        (["--rate-mbit", "1"], "--target"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    link_emulator.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(flags)
    assert said in capsys.readouterr().err
