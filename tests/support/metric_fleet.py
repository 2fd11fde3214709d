"""The metrics of a coordinator and of a peer of every role: every metric of the code, each with values."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector

from learner.contributor.metrics import ContributorMetrics
from learner.metrics import LearnerMetrics
from node.coordinator.fleet.membership import PeerState
from node.coordinator.fleet.survey import MEASURES, FleetSurvey, Measured
from node.coordinator.metrics import CoordinatorMetrics
from node.identity.peer import Peer
from node.relay.metrics import RelayMetrics
from node.system.clock import SystemClock
from node.telemetry.metrics import NodeMetrics, create_registry
from node.telemetry.transfer_metrics import TransferMetrics
from node.values.evaluation import Evaluation, EvaluationStatus
from node.values.peer_figures import FIGURES
from node.values.roles import Role
from node.values.run import SamplerStanding, StepReport, Teaching
from sampler.metrics import SamplerMetrics, VerifierMetrics

SAMPLERS: Final = ("sampler-1", "sampler-2")

LABEL_VALUES: Final[dict[str, tuple[str, ...]]] = {
    "age_versions": ("1", "8"),
    "bound": ("staleness", "buffer"),
    "by": ("learner", "samplers"),
    "cause": ("full", "late"),
    "certificate": ("authority", "learner"),
    "codec": ("sparse",),
    "contributor": ("contributor-1",),
    "direction": ("in", "out"),
    "fault": ("lost", "lied"),
    "for": ("prompt lease",),
    "kind": ("delta", "keyframe"),
    "name": ("length",),
    "operation": ("put",),
    "outcome": ("agreed", "late"),
    "reason": ("disk", "bad_signature"),
    "roles": ("all",),
    "sampler": SAMPLERS,
    "service": ("rollout",),
    "setting": ("", "coordinator.buffer_groups"),
    "stage": ("sampled", "trained"),
    "state": ("leased", "spooled", "accepted", "trained"),
    "to": ("coordinator", "relay"),
    "verdict": ("spooled", "accepted", "stale"),
    "version": ("0",),
    "what": ("options",),
    "writer": ("samples",),
}
"""Some values of every label."""

_EVALUATION: Final = Evaluation(
    *(8, 0, 4, 1, 0.0, 16, 1.0, 2.0),
    counted_prompts=4,
    samplers=2,
    reward_mean=0.5,
    reward_standard_error=0.1,
    cut_ratio=0.25,
    tokens_mean=9.0,
)


class MetricFleet:
    """One coordinator, learner, contributor, relay and verifier, and two samplers."""

    def __init__(self) -> None:
        self._hub = _registry("coordinator")
        coordinator = self._coordinator = CoordinatorMetrics(self._hub)
        self._peers: dict[Peer, CollectorRegistry] = {}
        self._add("learner-1", Role.LEARNER, LearnerMetrics)
        self._add("contributor-1", Role.CONTRIBUTOR, ContributorMetrics)
        self._add("relay-1", Role.RELAY, RelayMetrics)
        self._add("verifier-1", Role.VERIFIER, VerifierMetrics)
        for name in SAMPLERS:
            self._add(name, Role.SAMPLER, SamplerMetrics)
        measured = Measured(1, 2.0, 3.0, 0.1, dict.fromkeys(FIGURES, 1.0))
        coordinator.show_fleet(
            FleetSurvey(
                {(peer.role, PeerState.LIVE): 1 for peer in self._peers},
                dict.fromkeys(SamplerStanding, 1),
                {measure: np.array([1.0, 2.0]) for measure in (*MEASURES, *FIGURES)},
                tuple((peer, measured) for peer in self._peers),
                (),
            )
        )
        under_way = replace(_EVALUATION, version=9, finished_at_s=0.0)
        coordinator.evaluations.status = EvaluationStatus(_EVALUATION, _EVALUATION, _EVALUATION, under_way)
        self._turns = 0

    def _add(self, name: str, role: Role, instruments: type) -> None:
        registry = self._peers[Peer("run", role, name)] = _registry(role)
        instruments(registry)

    def next_exposition(self) -> bytes:
        """Let every metric rise, and return what a Prometheus that scrapes all of them sees then."""
        self._turns += 1
        step = StepReport(1, 0.1 + 0.001 * self._turns, 1.0, 2, 0.1, 0.9, 0.1, 1.0, 2.0, 3.0)
        self._coordinator.show_steps(step, Teaching(8, 1, 0.5, 2.0))
        for registry in (self._hub, *self._peers.values()):
            for collector in registry._collector_to_names:
                _raise(collector, self._turns)
        scraped = CollectorRegistry()
        scraped.register(_Scraped(self._hub, self._peers))
        return generate_latest(scraped)


class _Scraped(Collector):
    """Every process's metrics, those of peers with the labels that prometheus.yml gives them."""

    def __init__(self, hub: CollectorRegistry, peers: Mapping[Peer, CollectorRegistry]) -> None:
        self._hub, self._peers = hub, peers

    def collect(self) -> Iterable[Metric]:
        families = {metric.name: metric for metric in self._hub.collect()}
        for peer, registry in self._peers.items():
            for metric in registry.collect():
                if not metric.name.startswith("heterorl_"):
                    continue
                family = families.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type)
                )
                for one in metric.samples:
                    labels = {**one.labels, "node": peer.node_id, "role": peer.role.value}
                    family.add_sample(one.name, labels, one.value)
        return families.values()


def _registry(role: str) -> CollectorRegistry:
    registry = create_registry()
    NodeMetrics(registry, roles=[role], clock=SystemClock())
    TransferMetrics(registry)
    return registry


def _raise(collector: Collector, turn: int) -> None:
    if not isinstance(collector, Counter | Gauge | Histogram):
        return
    for values in itertools.product(*(LABEL_VALUES[name] for name in collector._labelnames)):
        child = collector.labels(*values) if values else collector
        if isinstance(child, Counter):
            child.inc(3)
        elif isinstance(child, Gauge):
            child.set(0.1 + 0.001 * turn)
        else:
            child.observe(1.0)
