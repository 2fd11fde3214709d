"""``python -m bench.peers``: what a coordinator costs by the number of its peers.

    python -m bench.peers                           100, 1000, 3000 and 10 000 peers, a fresh coordinator each
    python -m bench.peers --peers 300 --seconds 20  a quick look
    python -m bench.peers --peers 10000 --bare      and what gRPC alone takes for these heartbeats

The coordinator is ``heterorl-node --role coordinator`` in a process of its own, with TLS and its defaults,
but for what --set changes. Peers are a learner and samplers, each with a connection, a certificate and a
stream of heartbeats. Another process holds them (``bench/peer_lab``), on the same cores. Meanwhile
the metrics are scraped every 15 s and the status is asked for. A peer has one connection; a working sampler
has four.

peers, pause_s   connected; seconds between two heartbeats of one, as the coordinator asks or else --every
rate_s           heartbeats a second, all together
cpu_ms           CPU of the coordinator a heartbeat, with scrapes, upkeep and status; cores: the same a second
bare_ms          the same of a grpc.aio server that does nothing (bench/peer_lab/bare_server.py); with --bare
p50, p99_ms      from a heartbeat's first byte to its answer, at the generator
rss_mb, peer_kb  resident memory of the coordinator; a peer's part of it, above that before the first
join_ms          CPU of the coordinator for a handshake, a join and the first heartbeat
series           on /metrics; scrape_s, scrape_kb: the slowest scrape and its size
status_s         ``heterorl-node status`` as a process; rpc_s: the call alone

Prints a line of JSON a row. Exits with 1 if a row of 10 000 peers misses a promise.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.shared.measure import percentile
from bench.shared.measured_process import ended, started
from bench.shared.played_run import Hub, PlayedRun
from node.commands.status.status_command import fetch_status
from node.system import descriptors
from node.values.roles import Role

PEERS: Final = (100, 1000, 3000, 10_000)
SCRAPE_EVERY_S: Final = 15.0
JOIN_TIMEOUT_S: Final = 1800.0
"""10 000 handshakes on two busy cores."""

PROMISED_PEERS: Final = 10_000
PROMISES: Final[dict[str, float]] = {
    "rss_mb": 1200.0,
    "cpu_ms": 0.25,
    "p99_ms": 250.0,
    "series": 5000,
    "scrape_s": 1.0,
    "status_s": 1.0,
}
"""Most that a row of ``PROMISED_PEERS`` may show."""

_FILES_BESIDE_PEERS: Final = 1024


@dataclass(frozen=True, slots=True)
class Row:
    """One coordinator's figures; units as in the module's text."""

    peers: int
    connected: int
    pause_s: float
    rate_s: float
    cpu_ms: float
    bare_ms: float
    cores: float
    p50_ms: float
    p99_ms: float
    rss_mb: float
    peer_kb: float
    join_ms: float
    series: int
    scrape_s: float
    scrape_kb: float
    status_s: float
    rpc_s: float
    lost: int


def main() -> int:
    """Measure each number of peers; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", type=int, nargs="+", default=PEERS, metavar="N")
    parser.add_argument("--seconds", type=float, default=60.0, help="measured, after all have joined")
    parser.add_argument("--every", type=float, default=10.0, help="s between heartbeats, unless told")
    parser.add_argument("--bare", action="store_true", help="measure a server that does nothing as well")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    arguments = parser.parse_args()
    most, wanted = descriptors.raise_limit(), max(arguments.peers) + _FILES_BESIDE_PEERS
    if most < wanted:
        parser.error(
            f"{max(arguments.peers)} peers take {wanted} open files, allowed are {most}: raise ulimit -Hn"
        )
    # As Ctrl-C: the coordinator and the generators are ended, and the directory is removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows = []
    for peers in arguments.peers:
        rows.append(asyncio.run(measured(peers, arguments)))
        print(json.dumps(dataclasses.asdict(rows[-1])), flush=True)
    missed = [text for row in rows for text in broken_promises(row)]
    print("\n".join(missed), end="\n" if missed else "", file=sys.stderr)
    return 1 if missed else 0


def broken_promises(row: Row) -> list[str]:
    """Return a sentence for each promise that a row of at least ``PROMISED_PEERS`` misses."""
    if row.peers < PROMISED_PEERS:
        return []
    values = dataclasses.asdict(row)
    missed = [
        f"{row.peers} peers: {name} is {values[name]:g}, promised are {most:g}"
        for name, most in PROMISES.items()
        if values[name] > most
    ]
    return missed + ([f"{row.peers} peers: {row.lost} connections were lost"] if row.lost else [])


async def measured(peers: int, arguments: argparse.Namespace) -> Row:
    """Run a coordinator with so many peers and return what it showed."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as root:  # not /tmp, which may be memory
        run = PlayedRun.make(Path(root) / "run")
        settings = {"coordinator.prompts": 100, **dict(text.split("=", 1) for text in arguments.changes)}
        async with (
            run.coordinator(Path(root) / "coordinator.log", settings) as hub,
            _generator(run, hub.address, peers, arguments.every) as generator,
        ):
            idle_bytes, idle_cpu_s = hub.process.resident_bytes(), hub.process.cpu_s()
            await generator.joined()
            join_cpu_s = hub.process.cpu_s() - idle_cpu_s
            await generator.settled(arguments)
            began_s, began_cpu_s = time.perf_counter(), hub.process.cpu_s()
            scrapes, status_s, rpc_s = await _watched(hub, run, arguments.seconds)
            took_s = time.perf_counter() - began_s
            cpu_s = hub.process.cpu_s() - began_cpu_s
            seen = await generator.ask()
            resident = hub.process.resident_bytes()
        bare_s = await _bare_cpu_s(run, peers, arguments) if arguments.bare else 0.0
    latencies = seen["latencies_s"]
    heartbeats = len(latencies)
    slowest = max(scrapes)
    if seen["first_loss"]:
        print(seen["first_loss"], file=sys.stderr)
    return Row(
        peers=peers,
        connected=peers - seen["lost"],
        pause_s=round(seen["pause_s"], 2),
        rate_s=round(heartbeats / took_s, 1),
        cpu_ms=round(1000 * cpu_s / max(1, heartbeats), 3),
        bare_ms=round(1000 * bare_s, 3),
        cores=round(cpu_s / took_s, 3),
        p50_ms=round(1000 * percentile(latencies, 0.5), 1),
        p99_ms=round(1000 * percentile(latencies, 0.99), 1),
        rss_mb=round(resident / 1e6, 1),
        peer_kb=round((resident - idle_bytes) / 1e3 / peers, 1),
        join_ms=round(1000 * join_cpu_s / peers, 2),
        series=scrapes[-1][2],
        scrape_s=round(slowest[0], 2),
        scrape_kb=round(slowest[1] / 1e3, 1),
        status_s=round(status_s, 2),
        rpc_s=round(rpc_s, 3),
        lost=seen["lost"],
    )


async def _bare_cpu_s(run: PlayedRun, peers: int, arguments: argparse.Namespace) -> float:
    """Return CPU seconds a heartbeat of a server that does nothing, with the same peers."""
    words = ("-m", "bench.peer_lab.bare_server", "heartbeats", str(run.directory))
    async with started(words, run.directory.with_name("bare.log")) as server:
        address = (await server.said("listen"))["listen"]
        async with _generator(run, address, peers, arguments.every) as generator:
            await generator.joined()
            await generator.settled(arguments)
            began_cpu_s = server.cpu_s()
            await asyncio.sleep(arguments.seconds)
            cpu_s, seen = server.cpu_s() - began_cpu_s, await generator.ask()
    heartbeats: int = seen["heartbeats"]
    return cpu_s / max(1, heartbeats)


async def _watched(
    hub: Hub, run: PlayedRun, seconds: float
) -> tuple[list[tuple[float, int, int]], float, float]:
    """Scrape and ask for the status for a while.

    Returns seconds, bytes and series of each scrape, and the seconds of the command and of the call.
    """
    ends_s = time.perf_counter() + seconds
    scrapes = []
    await asyncio.sleep(seconds / 4)
    command_s = await _timed_command(hub.address, run)
    began_s = time.perf_counter()
    await fetch_status(hub.address, run.own_identity(Role.OPERATOR))
    rpc_s = time.perf_counter() - began_s
    while True:
        scrapes.append(await asyncio.to_thread(_scrape, hub))
        rest_s = ends_s - time.perf_counter()
        if rest_s <= 0:
            return scrapes, command_s, rpc_s
        await asyncio.sleep(min(rest_s, SCRAPE_EVERY_S))


async def _timed_command(target: str, run: PlayedRun) -> float:
    began_s = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "node", "status", "--state-dir", str(run.directory), "--coordinator", target,
        stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    if await process.wait():
        raise RuntimeError("heterorl-node status failed; what it said is above")
    return time.perf_counter() - began_s


def _scrape(hub: Hub) -> tuple[float, int, int]:
    """Return seconds, bytes and series of a scrape."""
    began_s = time.perf_counter()
    with urllib.request.urlopen(f"{hub.telemetry}/metrics", timeout=60) as response:
        page: bytes = response.read()
    series = sum(bool(line) and not line.startswith(b"#") for line in page.splitlines())
    return time.perf_counter() - began_s, len(page), series


class _Generator:
    """A process that holds peers; see ``bench/peer_lab/generator.py``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def hear(self) -> dict[str, Any]:
        """Return its next line. Raises RuntimeError: it has ended."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("a generator ended; what it said is above")
        heard: dict[str, Any] = json.loads(line)
        return heard

    async def joined(self) -> None:
        """Wait until all have joined."""
        async with asyncio.timeout(JOIN_TIMEOUT_S):
            await self.hear()

    async def settled(self, arguments: argparse.Namespace) -> None:
        """Let the last to join settle in, and forget what was seen."""
        await asyncio.sleep(min(arguments.every, arguments.seconds / 4))
        await self.ask()

    async def ask(self) -> dict[str, Any]:
        """Return what it saw since it was asked before."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        return await self.hear()


@contextlib.asynccontextmanager
async def _generator(run: PlayedRun, target: str, count: int, every_s: float) -> AsyncIterator[_Generator]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.peer_lab.generator"),
        *(str(run.directory), target, str(count), str(every_s)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 26,  # latencies of a minute of 10 000 peers
    )  # fmt: skip
    try:
        yield _Generator(process)
    finally:
        await ended(process, grace_s=0.0)


if __name__ == "__main__":
    sys.exit(main())
