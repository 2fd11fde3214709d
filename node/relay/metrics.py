"""Metrics of a relay."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from node.telemetry.metric_factory import MetricFactory
from node.weights.store.artifact_store import ArtifactStore


class RelayMetrics:
    """A relay's instruments; used on the event loop's thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        new = MetricFactory(registry, "relay")
        self._head = new.gauge("head_version", "Newest version this relay announces; -1 before the first.")
        self._connections = new.gauge(
            "connections", "Connections passed on to the coordinator, and those served here.", "to"
        )
        self._most_connections = new.gauge("connection_limit", "Most connections of both kinds together.")

    def watch_store(self, store: ArtifactStore) -> None:
        """Read the newest version at every scrape."""
        self._head.set_function(lambda: -1 if (head := store.head()) is None else head.number)

    def watch_connections(
        self, *, passed_on: Callable[[], int], served_here: Callable[[], int], limit: int
    ) -> None:
        """Read the numbers of connections at every scrape."""
        self._connections.labels("coordinator").set_function(passed_on)
        self._connections.labels("relay").set_function(served_here)
        self._most_connections.set(limit)
