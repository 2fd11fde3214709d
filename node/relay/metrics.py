"""What a relay shows of itself beyond what every peer shows."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from node.rollout import Verdict


class RelayMetrics:
    """Used on the event loop's thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._head = Gauge(
            "heterorl_relay_head_version",
            "Newest version this relay announces; -1 before the first.",
            registry=registry,
        )
        self._spooled = Gauge(
            "heterorl_relay_spooled_groups",
            "Groups on this relay's disk that the coordinator has not answered for.",
            registry=registry,
        )
        self._forwarded = Counter(
            "heterorl_relay_forwarded_groups",
            "Groups handed on, by what the coordinator said of them.",
            ["verdict"],
            registry=registry,
        )
        self.dropped_groups = Counter(
            "heterorl_relay_dropped_groups",
            "Groups lost here: the coordinator would not hear of them, or the disk changed them.",
            registry=registry,
        )

    def watch(self, *, head: Callable[[], float], spooled: Callable[[], float]) -> None:
        """Show these whenever someone looks."""
        self._head.set_function(head)
        self._spooled.set_function(spooled)

    def count_forwarded(self, verdict: Verdict) -> None:
        self._forwarded.labels(verdict.value).inc()
