"""Observations of a run: the coordinator's status and every process's metrics."""

import asyncio
import math
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from deploy.runs.records import Step, StepTail
from node.commands.status.status_command import fetch_status
from node.errors import RefusedError
from node.identity.identity_store import Identity
from node.rpc.call_ends import ConnectionLost
from node.values.run import RunStatus

SCRAPE_TIMEOUT_S: Final = 2.0


class Metrics:
    """One scrape of one process."""

    def __init__(self, text: str = "") -> None:
        """Read the Prometheus text format."""
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with this name and these labels; 0 without any."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the samples with this name that are numbers, by one of their labels."""
        return {
            sample.labels[label]: sample.value
            for sample in self._samples
            if sample.name == name and not math.isnan(sample.value)
        }


class Scrapes:
    """The newest scrape of every incarnation of every process, so that counters survive restarts."""

    def __init__(self) -> None:
        self._of: dict[str, dict[int, Metrics]] = {}

    def put(self, name: str, incarnation: int, metrics: Metrics) -> None:
        self._of.setdefault(name, {})[incarnation] = metrics

    def newest(self, name: str) -> Metrics:
        """Return the last scrape of the newest incarnation."""
        incarnations = self._of.get(name)
        return incarnations[max(incarnations)] if incarnations else Metrics()

    def total(self, process: str, metric: str, **labels: str) -> float:
        """Return the sum of a counter over all incarnations of a process."""
        return sum(metrics.total(metric, **labels) for metrics in self._of.get(process, {}).values())


@dataclass(frozen=True, slots=True)
class Observation:
    """The state of the run at one moment."""

    elapsed_s: float
    """Since the run began."""
    steps: Sequence[Step]
    """All so far, oldest first."""
    status: RunStatus | None
    """None: the coordinator did not answer."""
    scrapes: Scrapes

    @property
    def version(self) -> int:
        """The newest version made."""
        return self.steps[-1].version if self.steps else 0


class Observer:
    """Observes the run; a process that does not answer keeps its last scrape."""

    def __init__(
        self,
        *,
        step_tail: StepTail,
        coordinator: str,
        operator: Identity,
        telemetry_ports: Mapping[str, int],
        incarnations: Mapping[str, int],
        began_s: float,
    ) -> None:
        """Observe processes by name; the caller keeps ``incarnations`` up to date."""
        self._step_tail = step_tail
        self._coordinator = coordinator
        self._operator = operator
        self._ports = telemetry_ports
        self._incarnations = incarnations
        self._began_s = began_s
        self._scrapes = Scrapes()

    async def observe(self) -> Observation:
        """Ask all processes at once."""
        status, *_ = await asyncio.gather(self._status(), *(self._scrape(name) for name in self._ports))
        return Observation(
            elapsed_s=time.monotonic() - self._began_s,
            steps=self._step_tail.read(),
            status=status,
            scrapes=self._scrapes,
        )

    async def _status(self) -> RunStatus | None:
        try:
            return await fetch_status(self._coordinator, self._operator)
        except (ConnectionLost, RefusedError):
            return None

    async def _scrape(self, name: str) -> None:
        incarnation = self._incarnations.get(name, 0)
        metrics = await scrape(self._ports[name])
        if metrics is not None:
            self._scrapes.put(name, incarnation, metrics)


async def scrape(port: int) -> Metrics | None:
    """Return a process's metrics; None if it does not answer."""
    try:
        return Metrics(await asyncio.to_thread(_get, f"http://127.0.0.1:{port}/metrics"))
    except OSError:
        return None


async def is_ready(port: int) -> bool:
    """Return whether a process serves."""
    try:
        await asyncio.to_thread(_get, f"http://127.0.0.1:{port}/readyz")
    except OSError:  # not there yet, or 503
        return False
    return True


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=SCRAPE_TIMEOUT_S) as response:
        body: bytes = response.read()
    return body.decode()
