"""The directory of a run whose peers share this machine, and what each process is told of its place in it."""

import datetime
import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Final, Self

COORDINATOR: Final = "coordinator"
LEARNER: Final = "learner"

_SERVERS_PORTS: Final = range(10_000, 32_768)
"""Linux gives higher ones to connections, also while the server that had one is started again."""

Section = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports on the loopback interface, each used by one process."""

    members: int
    enrolment: int
    telemetry: Mapping[str, int]
    """By process."""
    others: Mapping[str, int]
    """Ports of relays and emulated links, by process."""

    @classmethod
    def free(cls, daemons: Sequence[str], *, others: Sequence[str] = ()) -> Self:
        """Return ports that are free now; a process whose port is taken meanwhile fails with a message."""
        members, enrolment, *ports = free_ports(2 + len(daemons) + len(others))
        telemetry, rest = ports[: len(daemons)], ports[len(daemons) :]
        return cls(
            members,
            enrolment,
            dict(zip(daemons, telemetry, strict=True)),
            dict(zip(others, rest, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of one run; each peer has a state directory of its own."""

    root: Path

    @classmethod
    def make(cls, runs: Path, name: str) -> Self:
        """Make a directory in ``runs``, named after ``name`` and the time, and point ``latest`` at it."""
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        directory = cls((runs / name.format(stamp=stamp)).resolve())
        directory.make_folders()
        link = runs / f".latest-{os.getpid()}"
        link.symlink_to(directory.root.name)
        link.replace(runs / "latest")
        return directory

    def make_folders(self) -> None:
        """Make the folders that processes write to."""
        for folder in ("config", "logs", "state"):
            (self.root / folder).mkdir(parents=True)

    @property
    def run_id(self) -> str:
        return self.root.name

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def coordinator_state(self) -> Path:
        """The directory that ``heterorl-node init`` makes."""
        return self.state(COORDINATOR)

    @property
    def run_file(self) -> Path:
        return self.coordinator_state / "run.json"

    @property
    def ledger(self) -> Path:
        return self.coordinator_state / "coordinator" / "ledger.sqlite"

    @property
    def step_log(self) -> Path:
        return self.state(LEARNER) / "learner" / "steps.jsonl"

    def state(self, name: str) -> Path:
        return self.root / "state" / name

    def token(self, name: str) -> Path:
        return self.state(name) / "token"

    def config(self, name: str) -> Path:
        return self.root / "config" / f"{name}.toml"

    def log(self, name: str) -> Path:
        return self.root / "logs" / f"{name}.log"

    def place(self, name: str, ports: Ports, *, dials: int | None) -> dict[str, Section]:
        """Return the sections ``node`` and ``telemetry`` of a process.

        Args:
            name: Of the process, which begins with its role.
            ports: Of the run.
            dials: Port at which it reaches the coordinator; None: it is the coordinator.
        """
        node: dict[str, object] = {"state_dir": str(self.state(name)), "run_file": str(self.run_file)}
        if dials is not None:
            node["coordinator"] = f"127.0.0.1:{dials}"
        if name not in (COORDINATOR, LEARNER):
            node |= {"node_id": name, "token_file": str(self.token(name))}
        telemetry = {"http_listen": f"127.0.0.1:{ports.telemetry[name]}", "log_format": "json"}
        return {"node": node, "telemetry": telemetry}


def role_of(name: str) -> str:
    """Return the role of a process from its name."""
    return name.partition("-")[0]


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that are free now, and that nothing but a server takes.

    Raises:
        OSError: nearly all are taken.
    """
    found: list[int] = []
    with ExitStack() as stack:
        for port in SystemRandom().sample(_SERVERS_PORTS, 64 * count):
            if len(found) == count:
                return found
            one = stack.enter_context(socket.socket())
            with suppress(OSError):
                one.bind(("127.0.0.1", port))
                found.append(port)
    raise OSError(f"the loopback interface has no {count} free ports below {_SERVERS_PORTS.stop}")


def to_toml(document: Mapping[str, Section]) -> str:
    """Return sections of text, numbers and booleans as TOML, which writes those as JSON does."""
    blocks = (
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())])
        for name, section in document.items()
    )
    return "\n\n".join(blocks) + "\n"
