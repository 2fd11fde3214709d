"""The processes of a measurement, each in a namespace, and the identities they meet by.

A hub and its receivers are ours (hub.py, receivers.py) around the parts that coordinator and sampler
are made of; a relay is ``heterorl-node --role relay``. They are spoken to in lines of JSON.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.shared.played_run import PlayedRun
from bench.sync_lab.network import Namespace
from node.identity.identity_store import IDENTITY_DIRECTORY, save_identity
from node.values.roles import Role
from sampler.process_tree import cpu_seconds

PORT: Final = 7700
ANSWERS_WITHIN_S: Final = 120.0


class Process:
    """A child that answers lines of JSON with lines of JSON."""

    def __init__(self, namespace: Namespace, module: str, settings: dict[str, Any], *, log: Path) -> None:
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            namespace.command(sys.executable, "-m", module, json.dumps(settings)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._lines: list[dict[str, Any]] = []
        self._has_ended = False
        self._spoke = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        self.name = f"{module} in {namespace.name}"
        self.answer("ready")

    def tell(self, **order: Any) -> None:
        """Return an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self, key: str, *, timeout_s: float = ANSWERS_WITHIN_S) -> dict[str, Any]:
        """Return the next line that has ``key``; other lines stay for who waits for them.

        Raises:
            TimeoutError: it did not come; the log says why.
        """
        deadline = time.monotonic() + timeout_s
        with self._spoke:
            while True:
                line = next((line for line in self._lines if key in line), None)
                if line is not None:
                    self._lines.remove(line)
                    return line
                if self._has_ended or not self._spoke.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"{self.name} did not say {key!r}; see {self._log.name}")

    def cpu_s(self) -> float:
        """Return the processor seconds it has taken."""
        return cpu_seconds(self._process.pid)

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            with self._spoke:
                self._lines.append(json.loads(text))
                self._spoke.notify()
        with self._spoke:
            self._has_ended = True
            self._spoke.notify()


@dataclass(frozen=True, slots=True)
class Fleet:
    """Starts the processes of one measurement in ``directory``."""

    run: PlayedRun
    directory: Path

    @contextmanager
    def hub(self, namespace: Namespace, training: Path) -> Iterator[Process]:
        """Run a hub on PORT of every address of a namespace."""
        settings = {
            "run": str(self.run.directory),
            "training": str(training),
            "state": str(self.directory / "hub"),
            "listen": f"0.0.0.0:{PORT}",
        }
        yield from self._process(namespace, "bench.sync_lab.hub", settings)

    @contextmanager
    def receivers(
        self,
        namespace: Namespace,
        training: Path,
        *,
        sources: Sequence[str],
        connections: int,
        count: int = 1,
        server: Role = Role.COORDINATOR,
    ) -> Iterator[Process]:
        """Run ``count`` samplers' weight halves in one process; ``server`` is the role of their sources."""
        names = [f"sampler-{number}" for number in range(count)]
        for name in names:
            self._certify(Role.SAMPLER, name, self.directory / name)
        settings = {
            "run": str(self.run.directory),
            "training": str(training),
            "state": str(self.directory),
            "names": names,
            "sources": [f"{address}:{PORT}" for address in sources],
            "connections": connections,
            "server": server.value,
        }
        yield from self._process(namespace, "bench.sync_lab.receivers", settings)

    @contextmanager
    def relay(
        self, namespace: Namespace, name: str, *, upstream: str, is_behind_relay: bool = False
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Run ``heterorl-node --role relay`` on PORT, which mirrors from ``upstream``: the hub or a relay."""
        state = self.directory / name
        self._certify(Role.RELAY, name, state / Role.RELAY)
        arguments = [
            *("--role", "relay", "--coordinator", f"{upstream}:{PORT}"),
            *("--state-dir", str(state), "--run-file", str(self.run.directory / "run.json")),
            *("--set", f"relay.listen=0.0.0.0:{PORT}", "--set", "telemetry.http_listen=127.0.0.1:7790"),
        ]
        if is_behind_relay:
            arguments += ["--set", f'relay.upstream=["{upstream}:{PORT}"]']
        with (self.directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                namespace.command(sys.executable, "-m", "node", *arguments), stdout=log, stderr=log
            )
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def _certify(self, role: Role, name: str, directory: Path) -> None:
        """Save a new certificate of a peer, as enrolment would."""
        identity = directory / IDENTITY_DIRECTORY
        identity.mkdir(parents=True, mode=0o700)
        save_identity(self.run.new_identity(role, name), identity)

    def _process(self, namespace: Namespace, module: str, settings: dict[str, Any]) -> Iterator[Process]:
        log = self.directory / f"{module.rsplit('.', 1)[1]}-{namespace.name}.log"
        process = Process(namespace, module, settings, log=log)
        try:
            yield process
        finally:
            process.end()
