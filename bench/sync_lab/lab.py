"""Foundations of a measurement: versions, a run, and a hub with receivers at the ends of a line."""

import itertools
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.shared.played_run import PlayedRun
from bench.sync_lab.network import Line, Link, Namespace, Network
from bench.sync_lab.peers import Fleet, Process
from bench.sync_lab.versions import Model, Published, Training, publish_versions
from node.values.roles import Role

Facts = dict[str, Any]
"""One measurement: a line of JSON."""

STEADY: Final = (0.4, 0.9)
"""Shares of a transfer: after slow start, and before the first connection ends."""

CONNECTIONS: Final = 8
"""Connections of a receiver to each source, unless a measurement is about their number."""


@dataclass(slots=True)
class Lab:
    """A directory, and what was made in it."""

    directory: Path
    is_quick: bool
    run: PlayedRun
    _trainings: dict[tuple[Model, int, int], Training] = field(default_factory=dict)

    def training(self, model: Model, *, steps: int = 2, keyframes: int = 2) -> Training:
        """Return versions of a model, made once: each step changes 1 % of the words."""
        key = (model, steps, keyframes)
        if key not in self._trainings:
            self._trainings[key] = publish_versions(
                self.directory / f"training-{len(self._trainings)}",
                model,
                run_id=self.run.authority.run_id,
                key=self.run.signing_key(),
                steps=steps,
                keyframes=keyframes,
                density=0.01,
            )
        return self._trainings[key]

    def smollm2(self) -> Training:
        """Return the versions of 135 M parameters, the first as a keyframe too."""
        return self.training(Model(), steps=6 if self.is_quick else 12, keyframes=1)

    @contextmanager
    def fleet(self) -> Iterator[Fleet]:
        """Return a place for the processes of one measurement; it is empty again afterwards."""
        directory = self.directory / "work"
        directory.mkdir()
        try:
            yield Fleet(self.run, directory)
        finally:
            shutil.rmtree(directory)

    @contextmanager
    def wired(
        self,
        training: Training,
        line: Line,
        *,
        relays: int = 0,
        ends_in_cable: bool = False,
        receivers: int = 1,
        connections: int = CONNECTIONS,
        congestion_control: str | None = None,
    ) -> Iterator["Wired"]:
        """Run a hub, relays one after the other, and receivers, each hop a line of its own.

        Args:
            ends_in_cable: the receivers are next to the last relay.
            congestion_control: of the hub; None: the kernel's default.
        """
        with self.fleet() as fleet, Network() as network, ExitStack() as running:
            hops = [network.namespace(f"hop{number}") for number in range(relays + 2)]
            if congestion_control is not None:
                network.allow(congestion_control)
                hops[0].set_tcp(congestion_control=congestion_control)
            cabled = [network.cable(*hops[-2:])[0]] if ends_in_cable else []
            pairs = list(itertools.pairwise(hops))
            links = [network.link(near, far, line) for near, far in pairs[: len(pairs) - len(cabled)]]
            sources = [*(link.a for link in links), *cabled]
            hub = running.enter_context(fleet.hub(hops[0], training.directory))
            for number, place in enumerate(hops[1:-1]):
                relay = fleet.relay(
                    place, f"relay-{number + 1}", upstream=sources[number], is_behind_relay=number > 0
                )
                running.enter_context(relay)
            group = fleet.receivers(
                hops[-1],
                training.directory,
                sources=sources[-1:],
                connections=connections,
                count=receivers,
                server=Role.RELAY if relays else Role.COORDINATOR,
            )
            yield Wired(hub, running.enter_context(group), links[0], receivers)

    @contextmanager
    def bare_line(self, line: Line) -> Iterator[tuple[Namespace, Namespace, Link, Path]]:
        """Return the ends of a line without anything of ours, the line, and a directory for rivals."""
        with self.fleet() as fleet, Network() as network:
            near, far = network.namespace("hub"), network.namespace("sampler")
            yield near, far, network.link(near, far, line), fleet.directory


@dataclass(frozen=True, slots=True)
class Sync:
    """One version at one receiver: seconds since the hub announced it."""

    verified_s: float
    served_s: float
    received_bytes: int
    """By this receiver since its start, repeats included."""


@dataclass(frozen=True, slots=True)
class Wired:
    """A hub and the process of its receivers, and the line that the hub is at."""

    hub: Process
    receivers: Process
    link: Link
    count: int

    @property
    def egress_bytes(self) -> int:
        """Bytes that left the hub so far."""
        return self.link.passed().bytes

    def synced(self, published: Published) -> list[Sync]:
        """Store an artifact at the hub; return when each receiver had it."""
        announced_s = put(self.hub, published.name)
        return syncs(self.receivers, version=published.version, announced_s=announced_s, count=self.count)


def put(hub: Process, name: str) -> float:
    """Store an artifact at the hub; return the monotonic second at which it announced it."""
    hub.tell(put=name)
    return float(hub.answer("announced_s")["announced_s"])


def syncs(
    receivers: Process, *, version: int, announced_s: float, count: int = 1, timeout_s: float = 180
) -> list[Sync]:
    """Wait until ``count`` receivers hold a version.

    Raises:
        TimeoutError: they do not in time.
    """
    done: list[Sync] = []
    while len(done) < count:
        line = receivers.answer("held", timeout_s=timeout_s)
        if line["held"] == version:
            verified_s, served_s = (line[key] - announced_s for key in ("verified_s", "served_s"))
            done.append(Sync(verified_s, served_s, line["received_bytes"]))
    return done


def is_exact(receivers: Process, training: Training) -> bool:
    """Say whether every receiver holds the words of the last version."""
    receivers.tell(compare=str(training.directory / "words.npy"))
    return bool(receivers.answer("is_exact")["is_exact"])


def watched_bytes(receivers: Process, *, until_bytes: int, until_s: float) -> list[tuple[float, int]]:
    """Return (monotonic seconds, payload bytes received), ten times a second, until so many or so late."""
    progress: list[tuple[float, int]] = []
    while not progress or (progress[-1][0] < until_s and progress[-1][1] < until_bytes):
        receivers.tell(count=True)
        line = receivers.answer("now_s")
        progress.append((line["now_s"], line["received_bytes"]))
        time.sleep(0.1)
    return progress


def steady_goodput(progress: Sequence[tuple[float, int]]) -> float:
    """Return the bytes per second between the STEADY shares of (seconds, bytes so far), growing."""
    total = progress[-1][1]
    start, end = (next(point for point in progress if point[1] >= share * total) for share in STEADY)
    return (end[1] - start[1]) / (end[0] - start[0])
