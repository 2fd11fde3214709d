"""The registry of a process, the instruments every peer has, and the snapshot that heartbeats carry.

Names follow ``heterorl_<node or a role>_<what>_<unit>[_total]``. The label ``node`` is reserved: the
coordinator adds it to other peers' samples, and a sample with it is not sent on.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Final

import prometheus_client
from prometheus_client import CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from node.errors import Reason
from node.system import descriptors
from node.system.clock import Clock
from node.telemetry.logging import dropped_lines
from node.telemetry.metric_factory import MetricFactory
from node.telemetry.own_faults import OwnFaults


def create_registry() -> CollectorRegistry:
    """Return a registry with the process's own memory, CPU and file descriptors."""
    # A creation time per series would double every counter and is of no use outside Prometheus.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def exposition(registry: CollectorRegistry) -> bytes:
    """Return the registry in the Prometheus text format, content type ``CONTENT_TYPE_LATEST``."""
    return generate_latest(registry)


class _LogCollector(Collector):
    """Counts what began before there was a registry."""

    def collect(self) -> Iterable[Metric]:
        text = "Lines of the log that were dropped because nobody read standard error."
        return [CounterMetricFamily("heterorl_node_log_lines_dropped", text, value=dropped_lines())]


_DISK_FIX: Final = "Make room on that disk, or see why it cannot be written (dmesg); all goes on by itself."


class NodeMetrics:
    """The instruments of every peer, whatever its roles."""

    def __init__(self, registry: CollectorRegistry, *, roles: Iterable[str], clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._open_waits: dict[int, str] = {}
        self.faults = OwnFaults(clock.monotonic)
        """Faults of this process itself."""
        new = MetricFactory(registry, "node")
        info = new.gauge("info", "Always 1; the labels say what runs.", "version", "roles")
        info.labels(version("heterorl-node"), "+".join(roles)).set(1)
        self._refusals = new.counter(
            "refusals",
            "Requests and payloads refused, by the service that refused and why.",
            "service",
            "reason",
        )
        self._waiting = new.gauge("waiting_tasks", "Tasks waiting now, by what for.", "for")
        self._wait_seconds = new.counter(
            "wait_seconds", "Time spent in waits that have ended, by what for.", "for"
        )
        self._certificates = new.gauge(
            "certificate_expiry_seconds",
            "Until a certificate of this process expires, by its own clock; below 0 it has.",
            "certificate",
        )
        open_files = new.gauge(
            "descriptors_used_ratio", "Open files of the process as a share of how many it may have."
        )
        open_files.set_function(lambda: descriptors.open_now() / descriptors.limit())
        registry.register(_LogCollector())
        self.disk_free_ratio: float | None = None
        """Share of the state directory's file system; None: not known."""
        self._disk_free_bytes = new.gauge(
            "disk_free_bytes",
            "Free on the file system of the state directory, for a process without privileges.",
        )
        self._disk_free_ratio = new.gauge("disk_free_ratio", "The same as a share of the file system.")

    def watch_certificate(self, name: str, *, not_after_s: float) -> None:
        """Export how long a certificate is still valid; ``not_after_s`` is Unix seconds."""
        self._certificates.labels(name).set_function(lambda: not_after_s - self._clock.now())

    def show_disk(self, *, free_bytes: int, size_bytes: int) -> None:
        """Export the free space of the state directory's file system."""
        self._disk_free_bytes.set(free_bytes)
        self.disk_free_ratio = free_bytes / size_bytes if size_bytes else 0.0
        self._disk_free_ratio.set(self.disk_free_ratio)

    def count_refusal(self, *, service: str, reason: Reason) -> None:
        self._refusals.labels(service, reason).inc()
        if reason is Reason.DISK:
            what = f"the disk of its state directory takes no writes of {service}"
            self.faults.failed(service, what, fix=_DISK_FIX)

    @contextlib.contextmanager
    def waiting(self, what: str, detail: str = "") -> Iterator[None]:
        """Count the body as a wait for ``what``, a fixed phrase such as ``prompt lease``. Any thread.

        Args:
            detail: what heartbeats say besides, such as a name; metrics do not.
        """
        started = self._clock.monotonic()
        with self._lock:
            number = next(self._numbers)
            self._open_waits[number] = f"{what}: {detail}" if detail else what
        self._waiting.labels(what).inc()
        try:
            yield
        finally:
            with self._lock:
                del self._open_waits[number]
            self._waiting.labels(what).dec()
            self._wait_seconds.labels(what).inc(self._clock.monotonic() - started)

    @property
    def waits_for(self) -> str:
        """Name of the longest open wait, sent with heartbeats; empty when nothing waits."""
        with self._lock:
            return next(iter(self._open_waits.values()), "")
