"""Network namespaces on this machine and the links between them.

    Namespace   ip netns; its loopback is up
    Link        two namespaces over link.c: rate, delay, loss, a router's queue; counts what passes
    Cable       two namespaces over veth: as fast as the machine

Needs root, iproute2, /dev/net/tun and a C compiler; ``python -m bench.sync`` says which of them is missing.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

LINK_SOURCE: Final = Path(__file__).with_name("link.c")
_TCP: Final = Path("/proc/sys/net/ipv4")
AVAILABLE: Final = _TCP / "tcp_available_congestion_control"
ALLOWED: Final = _TCP / "tcp_allowed_congestion_control"


def is_available(congestion_control: str) -> bool:
    """Return whether this kernel has a congestion control of that name."""
    return congestion_control in AVAILABLE.read_text().split()


def compiler() -> str | None:
    """Return the C compiler of this machine; None: there is none."""
    return next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


@dataclass(frozen=True, slots=True)
class Line:
    """Effect of a link on packets, the same in both directions."""

    rate_mbit: float
    """Per second, headers included; 0: no limit."""
    round_trip_ms: float
    loss: float = 0.0
    """Share of segments."""

    @property
    def queue_kb(self) -> float:
        """A router's buffer of one bandwidth-delay product, and never less than 64 packets."""
        return max(self.rate_mbit * self.round_trip_ms / 8, 96.0)

    @property
    def bytes_per_s(self) -> float:
        return self.rate_mbit * 1e6 / 8


@dataclass(frozen=True, slots=True)
class Namespace:
    """A network of its own: what runs in it reaches its links and nothing else."""

    name: str

    def command(self, *arguments: str) -> list[str]:
        """Return a command line that runs in here."""
        return ["ip", "netns", "exec", self.name, *arguments]

    def run(self, *arguments: str) -> None:
        """Run a command in here to its end.

        Raises:
            CalledProcessError: with what it said.
        """
        subprocess.run(self.command(*arguments), check=True, capture_output=True)

    def set_tcp(self, **settings: str) -> None:
        """Write ``net.ipv4.tcp_...`` of this network."""
        for key, value in settings.items():
            self.run("sysctl", "-q", "-w", f"net.ipv4.tcp_{key}={value}")


@dataclass(frozen=True, slots=True)
class Passed:
    """Traffic of one direction of a link."""

    bytes: int
    segments: int
    lost: int
    dropped: int


class Link:
    """A running emulator; ``a`` and ``b`` are the addresses of its ends."""

    def __init__(self, process: "subprocess.Popen[str]", *, a: str, b: str) -> None:
        self._process = process
        self.a = a
        self.b = b

    def passed(self) -> Passed:
        """Return what passed from a to b since the start."""
        self._order("count")
        assert self._process.stdout is not None
        return Passed(**json.loads(self._process.stdout.readline())["ab"])

    def cut(self) -> None:
        """Lose everything from now on."""
        self._order("down")

    def mend(self) -> None:
        """Carry packets again."""
        self._order("up")

    def _order(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()


class Network(ExitStack):
    """Makes namespaces and links, and removes them all at its end."""

    def __enter__(self) -> Self:
        super().__enter__()
        self._prefix = f"hrl{os.getpid()}"
        self._links = 0
        directory = self.enter_context(tempfile.TemporaryDirectory(prefix="heterorl-link-"))
        self._emulator = Path(directory) / "link"
        cc = compiler()
        assert cc is not None
        flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-pthread"]
        subprocess.run([cc, *flags, "-o", str(self._emulator), str(LINK_SOURCE)], check=True)
        return self

    def allow(self, congestion_control: str) -> None:
        """Allow namespaces a congestion control, which this kernel has."""
        allowed = ALLOWED.read_text()
        if congestion_control not in allowed.split():
            ALLOWED.write_text(f"{allowed.strip()} {congestion_control}")
            self.callback(ALLOWED.write_text, allowed)

    def namespace(self, role: str) -> Namespace:
        """Make a namespace."""
        name = f"{self._prefix}-{role}"
        subprocess.run(["ip", "netns", "add", name], check=True)
        self.callback(subprocess.run, ["ip", "netns", "delete", name], check=False)
        made = Namespace(name)
        made.run("ip", "link", "set", "lo", "up")
        return made

    def link(self, a: Namespace, b: Namespace, line: Line, *, seed: int = 0) -> Link:
        """Put a link between two namespaces."""
        number, addresses = self._next_addresses()
        arguments: Sequence[object] = (
            *(self._emulator, a.name, addresses[0], b.name, addresses[1], f"wan{number}"),
            *(line.rate_mbit, line.round_trip_ms / 2, line.loss, line.queue_kb, seed),
        )
        process = subprocess.Popen(
            [str(argument) for argument in arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.callback(_end, process)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise OSError(f"the link between {a.name} and {b.name} did not start")
        return Link(process, a=addresses[0], b=addresses[1])

    def cable(self, a: Namespace, b: Namespace) -> tuple[str, str]:
        """Put a veth pair between two namespaces; give the addresses of its ends."""
        number, addresses = self._next_addresses()
        ends = (f"lan{number}a", f"lan{number}b")
        near = ("name", ends[0], "netns", a.name)
        far = ("name", ends[1], "netns", b.name)
        subprocess.run(["ip", "link", "add", *near, "type", "veth", "peer", *far], check=True)
        for namespace, device, address in zip((a, b), ends, addresses, strict=True):
            namespace.run("ip", "address", "add", f"{address}/30", "dev", device)
            namespace.run("ip", "link", "set", device, "up")
        return addresses

    def _next_addresses(self) -> tuple[int, tuple[str, str]]:
        self._links += 1
        return self._links, (f"10.77.{self._links}.1", f"10.77.{self._links}.2")


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
