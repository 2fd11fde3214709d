from prometheus_client import CollectorRegistry

from node.telemetry.transfer_metrics import TransferMetrics
from node.values.policy import ArtifactKey


def test_bytes_are_counted_by_kind_and_direction() -> None:
    registry = CollectorRegistry()
    metrics = TransferMetrics(registry)
    metrics.count_received(ArtifactKey(2, 1), 30)
    metrics.count_received(ArtifactKey(3, 2), 12)
    metrics.count_received(ArtifactKey(2), 1000)
    metrics.count_sent(ArtifactKey(2, 1), 5)

    def bytes_of(kind: str, direction: str) -> float | None:
        labels = {"kind": kind, "direction": direction}
        return registry.get_sample_value("heterorl_node_transfer_bytes_total", labels)

    assert (bytes_of("delta", "in"), bytes_of("keyframe", "in"), bytes_of("delta", "out")) == (42, 1000, 5)
