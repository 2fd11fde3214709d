"""Other peers' metrics at the coordinator: one Prometheus target, and so many series however large the fleet.

Peers behind NAT cannot be scraped, so their metrics travel with heartbeats. They are shown in this order, for
as long as there is room for them in ``SERIES``:

    fleet     sums and quantiles over all samplers, and over all relays: ``heterorl_fleet_...``
    by name   everything, with the labels ``node`` and ``role``, of ``SHOWN`` peers of each role: of samplers
              those that an operator picks, then those heard of for the longest without a break
    worst     of the other samplers, the samples in ``WORST`` of those with the worst values

A peer's series end when it leaves or falls silent.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from node.identity.peer import Peer
from node.run import Role
from node.telemetry.fleet_totals import FleetTotals
from node.telemetry.metric_layout import RULES, Column, Layout, layout_of, shape_of, values_of
from node.telemetry.metrics import MetricFamily

SERIES: Final = 4_000
"""Most series of all other peers together; the coordinator's own are some hundreds."""
SHOWN: Final[dict[Role, int]] = {Role.LEARNER: 2, Role.RELAY: 16, Role.SAMPLER: 16, Role.VERIFIER: 2}
"""Peers whose metrics are shown by name. Two learners: one that takes over from another."""
WORST: Final[dict[str, bool]] = {
    "heterorl_sampler_starving_seconds": True,
    "heterorl_node_certificate_expiry_seconds": False,
    "heterorl_node_descriptors_used_ratio": True,
    "heterorl_node_disk_free_bytes": False,
    "heterorl_node_disk_free_ratio": False,
    "heterorl_node_frames_mended_total": True,
    "heterorl_node_refusals_total": True,
    "heterorl_node_source_faults_total": True,
}
"""Samples of which alerts want to name the peer; True: the highest are the worst."""
WORST_NAMED: Final = 8
"""How many of each."""
METRICS_EVERY_S: Final = 15.0
"""Shortest time between two reports of a peer, as often as Prometheus usually scrapes."""
REPORTS_PER_S: Final = 200.0
"""Most reports of the whole fleet, a hundredth of a core: one takes 0.05 ms. 10 000 peers: every 50 s."""

LAYOUTS_KNOWN: Final = 64
"""Most peers of a role have one of a few layouts: a fleet that comes back is not checked peer by peer."""

MISMATCH: Final = "heterorl_learner_sampler_mismatch_nats"
"""The learner's, by the label ``sampler``."""

_ROLES: Final = tuple(SHOWN)
_ADDED_UP: Final = (Role.SAMPLER, Role.RELAY)


class FleetCollector(Collector):
    """The newest metrics of every peer."""

    def __init__(self, picked: Collection[str] = ()) -> None:
        """Begin without peers; samplers named in ``picked`` are shown by name before others."""
        self._picked = frozenset(picked)
        self._totals = {role: FleetTotals(role) for role in _ROLES}
        self._present: dict[Role, dict[Peer, None]] = {role: {} for role in _ROLES}
        """Peers heard of, in the order of becoming so."""
        self._shown: dict[Role, dict[Peer, None]] = {role: {} for role in _ROLES}
        self._layouts: dict[object, tuple[Layout, int]] = {}
        """By role and shape, with how many families are left out."""
        self.refused = Counter[str]()
        """Families left out, by the rule they break."""

    @property
    def metrics_every_s(self) -> float:
        """How often each peer is to send its metrics."""
        return max(METRICS_EVERY_S, sum(map(len, self._present.values())) / REPORTS_PER_S)

    def admit(self, peer: Peer) -> None:
        """Note that a peer is here."""
        present = self._present[peer.role]
        if peer in present:
            return
        present[peer] = None
        shown = self._shown[peer.role]
        if peer.role is Role.SAMPLER and peer.node_id in self._picked and len(shown) >= SHOWN[peer.role]:
            displaced = next((one for one in reversed(shown) if one.node_id not in self._picked), None)
            if displaced is not None:
                del shown[displaced]
        if len(shown) < SHOWN[peer.role]:
            shown[peer] = None

    def is_known(self, peer: Peer) -> bool:
        """Return whether values alone say something, because what they are of is known."""
        return self._totals[peer.role].layout(peer) is not None

    def update(self, peer: Peer, families: Sequence[MetricFamily]) -> None:
        """Replace a peer's metrics by whole ones; leave out and count what breaks a rule."""
        self.admit(peer)
        layout = self._layout_of(families, peer.role)
        values = layout.kept(values_of(families))
        if values is not None:
            self._totals[peer.role].put(peer, layout, values)

    def _layout_of(self, families: Sequence[MetricFamily], role: Role) -> Layout:
        """Return the layout of a peer's metrics, shared with peers that have the same samples."""
        shape = (role, shape_of(families))
        known = self._layouts.get(shape)
        if known is None or known[1]:
            refused = Counter[str]()
            known = self._layouts[shape] = layout_of(families, role, refused), refused.total()
            self.refused.update(refused)
            if len(self._layouts) > LAYOUTS_KNOWN:
                del self._layouts[next(iter(self._layouts))]
        return known[0]

    def update_values(self, peer: Peer, values: Sequence[float]) -> None:
        """Replace the values of a peer's metrics; another number of values than it said is passed over."""
        layout = self._totals[peer.role].layout(peer)
        kept = None if layout is None else layout.kept(values)
        if layout is not None and kept is not None:
            self._totals[peer.role].put(peer, layout, kept)

    def drop(self, peer: Peer) -> None:
        """Forget a peer that left or fell silent: its metrics are out of date, and its place is free."""
        present, shown = self._present[peer.role], self._shown[peer.role]
        present.pop(peer, None)
        self._totals[peer.role].drop(peer)
        if peer in shown:
            del shown[peer]
            successor = next((one for one in present if one not in shown), None)
            if successor is not None:
                shown[successor] = None

    def named(self) -> frozenset[Peer]:
        """Return the peers that are shown by name, and samplers of the highest mismatch by the learner."""
        mismatching = {
            dict(column.labels).get("sampler", "")
            for _, _, column in self._totals[Role.LEARNER].worst(MISMATCH, is_highest=True, most=WORST_NAMED)
        }
        others = (peer for peer in self._present[Role.SAMPLER] if peer.node_id in mismatching)
        return frozenset(peer for shown in self._shown.values() for peer in shown) | frozenset(others)

    def collect(self) -> Iterator[Metric]:
        """Return one metric per name, with the samples of every peer that is shown with it."""
        refused = CounterMetricFamily(
            "heterorl_coordinator_fleet_families_refused",
            "Metrics of peers that were left out, by the rule they break.",
            labels=["rule"],
        )
        for rule in RULES:
            refused.add_metric([rule], self.refused[rule])
        yield refused
        fleet = [metric for role in _ADDED_UP for metric in self._totals[role].collect()]
        metrics = _Metrics(SERIES - sum(len(metric.samples) for metric in fleet))
        left_out = 0
        for role in _ROLES:
            # Copies: the scraper runs in another thread than ``update``.
            for peer in tuple(self._shown[role]):
                left_out += not metrics.add(peer, self._totals[role].values(peer))
        shown = frozenset(self._shown[Role.SAMPLER])
        for sample, is_highest in WORST.items():
            worst = self._totals[Role.SAMPLER].worst(sample, is_highest=is_highest, most=WORST_NAMED)
            for value, peer, column in worst:
                if peer not in shown:
                    metrics.add(peer, ((column, value),))
        by_name = GaugeMetricFamily(
            "heterorl_coordinator_fleet_peers_left_out",
            "Peers in the run whose metrics are not shown by name.",
            labels=["role"],
        )
        for role in _ROLES:
            by_name.add_metric([role], len(self._present[role]) - len(self._shown[role]))
        yield by_name
        yield GaugeMetricFamily(
            "heterorl_coordinator_fleet_peers_without_room",
            "Peers that would be shown by name, had their series room.",
            value=left_out,
        )
        yield GaugeMetricFamily(
            "heterorl_coordinator_fleet_metrics_interval_seconds",
            "Time between two reports of a peer's metrics.",
            value=self.metrics_every_s,
        )
        yield from _merged(fleet)
        yield from metrics.of.values()


class _Metrics:
    """Metrics of peers by name, as long as there is room for more series."""

    def __init__(self, room: int) -> None:
        self.of: dict[str, Metric] = {}
        self._room = room

    def add(self, peer: Peer, samples: Sequence[tuple[Column, float]]) -> bool:
        """Add all samples of a peer or none; return whether there was room."""
        if len(samples) > self._room:
            return False
        self._room -= len(samples)
        labels = {"node": peer.node_id, "role": peer.role.value}
        for column, value in samples:
            metric = self.of.get(column.family)
            if metric is None:
                metric = self.of[column.family] = Metric(column.family, column.help, column.type)
            if metric.type == column.type:
                metric.add_sample(column.sample, dict(column.labels) | labels, value)
        return True


def _merged(metrics: Iterable[Metric]) -> Iterable[Metric]:
    """Return one metric for each name, with the samples of all that have its type."""
    merged: dict[str, Metric] = {}
    for metric in metrics:
        first = merged.setdefault(metric.name, metric)
        if first is not metric and first.type == metric.type:
            first.samples.extend(metric.samples)
    return merged.values()
