"""What moving policy versions costs."""

from prometheus_client import CollectorRegistry

from node.policy import ArtifactKey
from node.telemetry.transfer_metrics import TransferMetrics


def test_two_roles_of_one_process_count_on_the_same_instruments() -> None:
    registry = CollectorRegistry()
    for received in (30, 12):
        TransferMetrics.of(registry).count_received(ArtifactKey(2, 1), received)
    TransferMetrics.of(CollectorRegistry()).count_received(ArtifactKey(2, 1), 1000)
    labels = {"kind": "delta", "direction": "in"}
    assert registry.get_sample_value("heterorl_node_transfer_bytes_total", labels) == 42
