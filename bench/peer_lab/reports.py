"""A sampler's metrics, as they travel: those of a real one that has worked for a while."""

from prometheus_client import CollectorRegistry

from heterorl.v1 import membership_pb2
from node.clock import SystemClock
from node.errors import Reason
from node.telemetry.metrics import MetricFamily, NodeMetrics, create_registry, snapshot
from node.telemetry.transfer_metrics import TransferMetrics
from node.verdict import Verdict
from node.wire.mapping import to_wire
from sampler.metrics import SamplerMetrics


def sampler_registry() -> CollectorRegistry:
    """Return the registry of a sampler with a usual number of labels in use."""
    registry = create_registry()
    node = NodeMetrics(registry, roles=["sampler"], clock=SystemClock())
    TransferMetrics(registry)
    sampler = SamplerMetrics(registry)
    for what in ("prompt lease", "prompt lease: learner", "policy version", "policy fetch"):
        with node.waiting(what):
            pass
    node.watch_certificate("sampler", not_after_s=2e9)
    node.count_refusal(service="policy", reason=Reason.BUSY)
    for verdict in Verdict:
        sampler.groups.labels(verdict).inc()
    for reason in ("lost", "refused", "stopping"):
        sampler.dropped_groups.labels(reason).inc()
    sampler.tokens.inc(1e6)
    sampler.swap_seconds.observe(0.1)
    return registry


def sampler_snapshot() -> tuple[MetricFamily, ...]:
    """Return such a sampler's metrics."""
    return snapshot(sampler_registry(), "sampler")


def sampler_metrics() -> list[membership_pb2.MetricFamily]:
    """Return them as a heartbeat carries them."""
    return [to_wire(membership_pb2.MetricFamily, family) for family in sampler_snapshot()]
