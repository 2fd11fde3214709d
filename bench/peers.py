"""``python -m bench.peers``: what a coordinator costs by the number of its peers.

    python -m bench.peers                           100, 1000, 3000 and 10 000 peers, a fresh coordinator each
    python -m bench.peers --peers 300 --seconds 20  a quick look
    python -m bench.peers --relays 10 --peers 2000  samplers behind relays, each in a process of its own
    python -m bench.peers --peers 10000 --bare      and what gRPC alone takes for these heartbeats

The coordinator is ``heterorl-node --role coordinator`` in a process of its own, with TLS and its defaults,
but for what --set changes. Peers are a learner and samplers, each with a connection, a certificate and a
stream of heartbeats. Another process or a few hold them (``bench/peer_lab``), on the same cores. Meanwhile
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
relay_mb         resident memory of a relay; relay_cores: of all of them, for passing connections on

Prints a table and a line of JSON a row. Exits with 1 if a row of 10 000 peers misses a promise.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import signal
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from node.commands.status.status_command import fetch_status
from node.config.settings import RUN_FILE
from node.enrolment.authority import LEAF_LIFETIME_S, Authority
from node.enrolment.init_run import AUTHORITY_DIRECTORY, IDENTITY_DIRECTORY, init_run, issue_identity
from node.identity.identity_store import Identity, load_identity, save_identity
from node.identity.peer import Peer
from node.system import descriptors
from node.values.run import Role

PEERS: Final = (100, 1000, 3000, 10_000)
SCRAPE_EVERY_S: Final = 15.0
READY_TIMEOUT_S: Final = 120.0
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
    relays: int
    relay_mb: float
    relay_cores: float


def main() -> int:
    """Measure each number of peers; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", type=int, nargs="+", default=PEERS, metavar="N")
    parser.add_argument("--seconds", type=float, default=60.0, help="measured, after all have joined")
    parser.add_argument("--every", type=float, default=10.0, help="s between heartbeats, unless told")
    parser.add_argument("--processes", type=int, default=1, help="that hold the peers")
    parser.add_argument("--relays", type=int, default=0, help="between the samplers and the coordinator")
    parser.add_argument("--bare", action="store_true", help="measure a server that does nothing as well")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    parser.add_argument("--profile", type=Path, help="write a profile of the coordinator's Python here")
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
    print(_table(rows), file=sys.stderr)
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
        run = Path(root) / "run"
        init_run(run, run_id="bench", hosts=("127.0.0.1",), now=time.time())
        operator = load_identity(run / Role.OPERATOR / IDENTITY_DIRECTORY)
        assert operator is not None
        async with _coordinator(run, arguments) as hub, contextlib.AsyncExitStack() as stack:
            idle_bytes, idle_cpu_s = hub.resident_bytes(), hub.cpu_s()
            relays = [
                await stack.enter_async_context(_relay(run, f"relay-{n}", hub.target))
                for n in range(arguments.relays)
            ]
            targets = ",".join([hub.target, *(one.target for one in relays)])
            generators = [
                await stack.enter_async_context(_generator(run, targets, first, count, arguments.every))
                for first, count in shares(peers, arguments.processes)
            ]
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                await asyncio.gather(*(one.hear() for one in generators))
            join_cpu_s = hub.cpu_s() - idle_cpu_s
            await asyncio.sleep(min(arguments.every, arguments.seconds / 4))  # the last to join settle in
            await asyncio.gather(*(one.ask() for one in generators))
            began_s, began_cpu_s = time.perf_counter(), hub.cpu_s()
            relays_cpu_s = sum(one.cpu_s() for one in relays)
            scrapes, status_s, rpc_s = await _watched(hub, run, operator, arguments.seconds)
            took_s, cpu_s = time.perf_counter() - began_s, hub.cpu_s() - began_cpu_s
            relays_cpu_s = sum(one.cpu_s() for one in relays) - relays_cpu_s
            seen = await asyncio.gather(*(one.ask() for one in generators))
            resident = hub.resident_bytes()
            relay_bytes = sum(one.resident_bytes() for one in relays) / max(1, len(relays))
        bare_s = await _bare_cpu_s(run, peers, arguments) if arguments.bare else 0.0
    latencies = sorted(one for report in seen for one in report["latencies_s"])
    heartbeats = len(latencies)
    slowest = max(scrapes)
    for report in seen:
        if report["first_loss"]:
            print(report["first_loss"], file=sys.stderr)
    return Row(
        peers=peers,
        connected=peers - sum(report["lost"] for report in seen),
        pause_s=round(sum(report["pause_s"] for report in seen) / len(seen), 2),
        rate_s=round(heartbeats / took_s, 1),
        cpu_ms=round(1000 * cpu_s / max(1, heartbeats), 3),
        bare_ms=round(1000 * bare_s, 3),
        cores=round(cpu_s / took_s, 3),
        p50_ms=round(1000 * _part(latencies, 0.5), 1),
        p99_ms=round(1000 * _part(latencies, 0.99), 1),
        rss_mb=round(resident / 1e6, 1),
        peer_kb=round((resident - idle_bytes) / 1e3 / peers, 1),
        join_ms=round(1000 * join_cpu_s / peers, 2),
        series=scrapes[-1][2],
        scrape_s=round(slowest[0], 2),
        scrape_kb=round(slowest[1] / 1e3, 1),
        status_s=round(status_s, 2),
        rpc_s=round(rpc_s, 3),
        lost=sum(report["lost"] for report in seen),
        relays=len(relays),
        relay_mb=round(relay_bytes / 1e6, 1),
        relay_cores=round(relays_cpu_s / took_s, 3),
    )


async def _bare_cpu_s(run: Path, peers: int, arguments: argparse.Namespace) -> float:
    """Return CPU seconds a heartbeat of a server that does nothing, with the same peers."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.peer_lab.bare_server", str(run)), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        hub = _Hub(process.pid, int(address.rpartition(":")[2]), telemetry=0)
        async with _generator(run, address, 0, peers, arguments.every) as generator:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                await generator.hear()
            await asyncio.sleep(min(arguments.every, arguments.seconds / 4))
            await generator.ask()
            began_cpu_s = hub.cpu_s()
            await asyncio.sleep(arguments.seconds)
            cpu_s, seen = hub.cpu_s() - began_cpu_s, await generator.ask()
    finally:
        await _end(process, grace_s=10.0)
    heartbeats: int = seen["heartbeats"]
    return cpu_s / max(1, heartbeats)


async def _watched(
    hub: "_Hub", run: Path, operator: Identity, seconds: float
) -> tuple[list[tuple[float, int, int]], float, float]:
    """Scrape and ask for the status for a while.

    Returns seconds, bytes and series of each scrape, and the seconds of the command and of the call.
    """
    ends_s = time.perf_counter() + seconds
    scrapes = []
    await asyncio.sleep(seconds / 4)
    command_s = await _timed_command(hub.target, run)
    began_s = time.perf_counter()
    await fetch_status(hub.target, operator)
    rpc_s = time.perf_counter() - began_s
    while True:
        scrapes.append(await asyncio.to_thread(hub.scrape))
        rest_s = ends_s - time.perf_counter()
        if rest_s <= 0:
            return scrapes, command_s, rpc_s
        await asyncio.sleep(min(rest_s, SCRAPE_EVERY_S))


async def _timed_command(target: str, run: Path) -> float:
    began_s = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "node", "status", "--state-dir", str(run), "--coordinator", target,
        stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    if await process.wait():
        raise RuntimeError("heterorl-node status failed; what it said is above")
    return time.perf_counter() - began_s


class _Hub:
    """The coordinator or a relay, as a process."""

    def __init__(self, pid: int, members: int, telemetry: int) -> None:
        self._process = psutil.Process(pid)
        self.target = f"127.0.0.1:{members}"
        self._telemetry = f"http://127.0.0.1:{telemetry}"

    def cpu_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    def resident_bytes(self) -> int:
        resident: int = self._process.memory_info().rss
        return resident

    def scrape(self) -> tuple[float, int, int]:
        """Return seconds, bytes and series of a scrape."""
        began_s = time.perf_counter()
        with urllib.request.urlopen(f"{self._telemetry}/metrics", timeout=60) as response:
            page: bytes = response.read()
        series = sum(bool(line) and not line.startswith(b"#") for line in page.splitlines())
        return time.perf_counter() - began_s, len(page), series

    async def ready(self, process: asyncio.subprocess.Process, log: Path) -> None:
        async with asyncio.timeout(READY_TIMEOUT_S):
            while not await asyncio.to_thread(self._is_ready):
                if process.returncode is not None:
                    raise RuntimeError(f"a hub ended:\n{await asyncio.to_thread(log.read_text)}")
                await asyncio.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._telemetry}/readyz", timeout=5):
                return True
        except OSError:
            return False


@contextlib.asynccontextmanager
async def _coordinator(run: Path, arguments: argparse.Namespace) -> AsyncIterator[_Hub]:
    members, enrolment, telemetry = _free_ports(3)
    settings = {
        "coordinator.listen": f"127.0.0.1:{members}",
        "coordinator.enrolment_listen": f"127.0.0.1:{enrolment}",
        "coordinator.task": "addition",
        "coordinator.prompts": "100",
        "telemetry.http_listen": f"127.0.0.1:{telemetry}",
        **dict(change.split("=", 1) for change in arguments.changes),
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    profiler = ["-m", "cProfile", "-o", str(arguments.profile)] if arguments.profile else []
    words = [*profiler, "-m", "node", "--role", "coordinator", "--state-dir", str(run), *words]
    async with _started(words, run.parent / "coordinator.log", members, telemetry) as hub:
        yield hub


@contextlib.asynccontextmanager
async def _relay(run: Path, name: str, coordinator: str) -> AsyncIterator[_Hub]:
    authority = Authority.load(run / Role.COORDINATOR / AUTHORITY_DIRECTORY)
    peer = Peer(authority.run_id, Role.RELAY, name)
    identity = issue_identity(authority, peer, now=time.time(), lifetime_s=LEAF_LIFETIME_S)
    save_identity(identity, run.parent / name / Role.RELAY / IDENTITY_DIRECTORY)
    listen, telemetry = _free_ports(2)
    words = [
        *("-m", "node", "--role", "relay", "--state-dir", str(run.parent / name)),
        *("--run-file", str(run / RUN_FILE), "--coordinator", coordinator),
        *("--set", f"relay.listen=127.0.0.1:{listen}"),
        *("--set", f"telemetry.http_listen=127.0.0.1:{telemetry}"),
    ]
    async with _started(words, run.parent / f"{name}.log", listen, telemetry) as hub:
        yield hub


@contextlib.asynccontextmanager
async def _started(words: Sequence[str], log: Path, port: int, telemetry: int) -> AsyncIterator[_Hub]:
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=file, stderr=file)
    try:
        hub = _Hub(process.pid, port, telemetry)
        await hub.ready(process, log)
        yield hub
    finally:
        await _end(process, grace_s=30.0)


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

    async def ask(self) -> dict[str, Any]:
        """Return what it saw since it was asked before."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        return await self.hear()


@contextlib.asynccontextmanager
async def _generator(
    run: Path, targets: str, first: int, count: int, every_s: float
) -> AsyncIterator[_Generator]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.peer_lab.generator"),
        *(str(run), targets, str(first), str(count), str(every_s)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 26,  # latencies of a minute of 10 000 peers
    )  # fmt: skip
    try:
        yield _Generator(process)
    finally:
        await _end(process, grace_s=0.0)


async def _end(process: asyncio.subprocess.Process, *, grace_s: float) -> None:
    with contextlib.suppress(ProcessLookupError, TimeoutError):
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(grace_s):
            await process.wait()
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def shares(peers: int, processes: int) -> list[tuple[int, int]]:
    """Return the first peer and the number of peers of each process."""
    bounds = [peers * n // processes for n in range(processes + 1)]
    return [(low, high - low) for low, high in itertools.pairwise(bounds)]


def _part(values: Sequence[float], part: float) -> float:
    return values[min(len(values) - 1, int(part * len(values)))] if values else 0.0


def _free_ports(count: int) -> list[int]:

    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _table(rows: Sequence[Row]) -> str:
    names = [field.name for field in dataclasses.fields(Row)]
    cells = [names, *([f"{getattr(row, name):g}" for name in names] for row in rows)]
    widths = [max(len(line[n]) for line in cells) for n in range(len(names))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells
    )


if __name__ == "__main__":
    sys.exit(main())
