"""Metrics of a relay."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from node.relay.rollout_spool import RolloutSpool
from node.verdict import Verdict
from node.weights.store.artifact_store import ArtifactStore


class RelayMetrics:
    """A relay's instruments; used on the event loop's thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._head = Gauge(
            "heterorl_relay_head_version",
            "Newest version this relay announces; -1 before the first.",
            registry=registry,
        )
        self._spooled = Gauge(
            "heterorl_relay_spooled_groups",
            "Groups on this relay's disk without the coordinator's answer.",
            registry=registry,
        )
        self._spooled_bytes = Gauge(
            "heterorl_relay_spooled_bytes", "The size of those groups.", registry=registry
        )
        self._forwarded = Counter(
            "heterorl_relay_forwarded_groups",
            "Groups forwarded, by the coordinator's verdict.",
            ["verdict"],
            registry=registry,
        )
        self.dropped_groups = Counter(
            "heterorl_relay_dropped_groups",
            "Groups lost here: the coordinator refused the message, or the disk changed it.",
            registry=registry,
        )

        self._samplers = Gauge(
            "heterorl_relay_samplers", "Samplers that this relay speaks for.", registry=registry
        )
        self._requests = Gauge(
            "heterorl_relay_waiting_requests",
            "Requests of those samplers that wait for the coordinator.",
            registry=registry,
        )
        self.dropped_verdicts = Counter(
            "heterorl_relay_dropped_verdicts",
            "Verdicts that a sampler was not told in time; the ledger counts them all.",
            registry=registry,
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
