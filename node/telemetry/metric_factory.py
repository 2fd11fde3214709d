"""Metrics by their short names: one place for the prefix of a role and for its registry."""

import math
from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)


class MetricFactory:
    """Registers metrics named ``heterorl_<owner>_<name>``; ``owner`` is a role, or ``node``."""

    def __init__(self, registry: CollectorRegistry, owner: str) -> None:
        self._registry = registry
        self._owner = owner

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(self._named(name), text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(self._named(name), text, labels, registry=self._registry)

    def unknown(self, name: str, text: str) -> Gauge:
        """Return a gauge that is NaN until it is set."""
        gauge = self.gauge(name, text)
        gauge.set(math.nan)
        return gauge

    def histogram(self, name: str, text: str, *labels: str, buckets: Iterable[float] = _SECONDS) -> Histogram:
        return Histogram(self._named(name), text, labels, buckets=tuple(buckets), registry=self._registry)

    def _named(self, name: str) -> str:
        return f"heterorl_{self._owner}_{name}"
