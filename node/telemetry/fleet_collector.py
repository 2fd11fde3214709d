"""Other peers' metrics, re-exported: one Prometheus target shows the whole fleet.

Peers behind NAT cannot be scraped, so their metrics travel with heartbeats. Each sample gets the labels
``node`` and ``role``. A peer cannot claim another peer's labels or another subsystem's names, nor use memory
without bound. ``SAMPLERS`` samplers have series, those that have been live the longest without a break: one
continuous series is worth more than several that take turns. A metric counts the others.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from node.identity.peer import Peer
from node.run import Role
from node.telemetry.metrics import MetricFamily

logger = logging.getLogger(__name__)

_FAMILY_NAME: Final = re.compile(r"heterorl_(node|learner|sampler|relay)_[a-z0-9_]{1,100}")
_LABEL_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,62}")
_RULES: Final = ("name", "shape", "samples")
_RESERVED_LABELS: Final = frozenset({"node", "role"})
_SUFFIXES: Final = {
    "counter": frozenset({"_total"}),
    "gauge": frozenset({""}),
    "histogram": frozenset({"_bucket", "_count", "_sum"}),
}
_LABEL_VALUE_CHARACTERS: Final = 200
_HELP_CHARACTERS: Final = 400
SAMPLES_PER_PEER: Final = 2_000
"""About ten times what a peer has; 500 peers at the bound are 1 M samples, 300 MB."""
SAMPLERS: Final = 500
"""With series, besides learner and relays. At 80 samples each, a scrape of all takes 0.2 s of a thread."""
METRICS_EVERY_S: Final = 15.0
"""Between the heartbeats of a peer that carry its metrics, as often as Prometheus usually scrapes. They are
13 kB, and most of what a heartbeat costs."""


class FleetCollector(Collector):
    """The newest metrics of every peer."""

    def __init__(self) -> None:
        self._families: dict[Peer, tuple[MetricFamily, ...]] = {}
        """Metrics of each peer with a place, empty before its first."""
        self._samplers = 0
        self._left_out: set[Peer] = set()
        self.refused = Counter[str]()
        """Families left out, by the rule they break."""

    def shows(self, peer: Peer) -> bool:
        """Return whether a peer has a place, so that its metrics are worth decoding."""
        return peer in self._families

    def admit(self, peer: Peer) -> bool:
        """Give a peer that sent a heartbeat a place, if there is one; return whether it has one."""
        if peer in self._families:
            return True
        is_sampler = peer.role is Role.SAMPLER
        if is_sampler and self._samplers >= SAMPLERS:
            if not self._left_out:
                logger.warning(
                    "more samplers than the metrics show",
                    extra={
                        "shown_samplers": SAMPLERS,
                        "first_without": peer.node_id,
                        "note": "samplers that joined last have no series of their own until others leave; "
                        "heterorl_coordinator_fleet_peers_left_out counts them",
                    },
                )
            self._left_out.add(peer)
            return False
        self._families[peer] = ()
        self._samplers += is_sampler
        self._left_out.discard(peer)
        return True

    def update(self, peer: Peer, families: Iterable[MetricFamily]) -> None:
        """Replace a peer's metrics if it has a place; leave out and count what breaks a rule."""
        if not self.admit(peer):
            return
        kept: dict[str, MetricFamily] = {}
        samples = 0
        for family in families:
            name = _FAMILY_NAME.fullmatch(family.name)
            if name is None or name[1] not in ("node", peer.role) or family.name in kept:
                self.refused["name"] += 1
            elif not _is_well_formed(family):
                self.refused["shape"] += 1
            elif samples + len(family.samples) > SAMPLES_PER_PEER:
                self.refused["samples"] += 1
            else:
                kept[family.name] = family
                samples += len(family.samples)
        self._families[peer] = tuple(kept.values())

    def drop(self, peer: Peer) -> None:
        """Forget a peer that left or fell silent: its metrics are out of date, and its place is free."""
        self._left_out.discard(peer)
        if self._families.pop(peer, None) is not None:
            self._samplers -= peer.role is Role.SAMPLER

    def collect(self) -> Iterator[Metric]:
        """Return one metric per name, with the samples of every peer that has it."""
        refused = CounterMetricFamily(
            "heterorl_coordinator_fleet_families_refused",
            "Metrics of peers that were left out, by the rule they break.",
            labels=["rule"],
        )
        for rule in _RULES:
            refused.add_metric([rule], self.refused[rule])
        yield refused
        left_out = GaugeMetricFamily(
            "heterorl_coordinator_fleet_peers_left_out",
            "Live samplers whose metrics are not shown, because there are more than places.",
            value=len(self._left_out),
        )
        yield left_out
        metrics: dict[str, Metric] = {}
        # A copy: the scraper runs in another thread than ``update``.
        for peer, families in tuple(self._families.items()):
            labels = {"node": peer.node_id, "role": peer.role.value}
            for family in families:
                metric = metrics.get(family.name)
                if metric is None:
                    metric = metrics[family.name] = Metric(
                        family.name, family.help[:_HELP_CHARACTERS], family.type
                    )
                if metric.type != family.type:
                    continue
                for sample in family.samples:
                    metric.add_sample(sample.name, sample.labels | labels, sample.value)
        yield from metrics.values()


def _is_well_formed(family: MetricFamily) -> bool:
    suffixes = _SUFFIXES.get(family.type, frozenset())
    series = {(sample.name, *sorted(sample.labels.items())) for sample in family.samples}
    return len(series) == len(family.samples) and all(
        sample.name.startswith(family.name)
        and sample.name.removeprefix(family.name) in suffixes
        and all(
            _LABEL_NAME.fullmatch(name)
            and name not in _RESERVED_LABELS
            and len(value) <= _LABEL_VALUE_CHARACTERS
            for name, value in sample.labels.items()
        )
        for sample in family.samples
    )
