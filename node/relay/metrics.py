"""Metrics of a relay."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from node.relay.rollout_spool import RolloutSpool
from node.telemetry.metric_factory import MetricFactory
from node.verdict import Verdict
from node.weights.store.artifact_store import ArtifactStore


class RelayMetrics:
    """A relay's instruments; used on the event loop's thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        new = MetricFactory(registry, "relay")
        self._head = new.gauge("head_version", "Newest version this relay announces; -1 before the first.")
        self._spooled = new.gauge(
            "spooled_groups", "Groups on this relay's disk without the coordinator's answer."
        )
        self._spooled_bytes = new.gauge("spooled_bytes", "The size of those groups.")
        self._forwarded = new.counter(
            "forwarded_groups", "Groups forwarded, by the coordinator's verdict.", "verdict"
        )
        self.dropped_groups = new.counter(
            "dropped_groups", "Groups lost here: the coordinator refused the message, or the disk changed it."
        )

        self._samplers = new.gauge("samplers", "Samplers that this relay speaks for.")
        self._requests = new.gauge(
            "waiting_requests", "Requests of those samplers that wait for the coordinator."
        )
        self.dropped_verdicts = new.counter(
            "dropped_verdicts", "Verdicts that a sampler was not told in time; the ledger counts them all."
        )

    def watch(
        self,
        store: ArtifactStore,
        spool: RolloutSpool,
        *,
        samplers: Callable[[], int],
        requests: Callable[[], int],
    ) -> None:
        """Read the gauges at every scrape."""
        self._samplers.set_function(samplers)
        self._requests.set_function(requests)
        self._head.set_function(lambda: -1 if (head := store.head()) is None else head.number)
        self._spooled.set_function(lambda: len(spool))
        self._spooled_bytes.set_function(lambda: spool.size_bytes)

    def count_forwarded(self, verdict: Verdict) -> None:
        self._forwarded.labels(verdict.value).inc()
