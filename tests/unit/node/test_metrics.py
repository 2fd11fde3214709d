import math
import threading
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, Summary
from prometheus_client.registry import Collector

from node import limits
from node.errors import Reason
from node.telemetry import metrics as metrics_module
from node.telemetry.metrics import (
    MetricFamily,
    MetricSample,
    NodeMetrics,
    create_registry,
    exposition,
    snapshot,
)
from support.clock import ManualClock


@pytest.fixture
def registry() -> CollectorRegistry:
    return create_registry()


def families(registry: CollectorRegistry) -> dict[str, MetricFamily]:
    return {family.name: family for family in snapshot(registry, "sampler")}


def test_a_snapshot_has_our_counters_gauges_and_histograms_as_prometheus_writes_them(
    registry: CollectorRegistry,
) -> None:
    Counter("heterorl_node_g", "Groups.", ["verdict"], registry=registry).labels("stale").inc(3)
    Gauge("heterorl_node_v", "Versions.", registry=registry).set(7)
    Histogram("heterorl_node_seconds", "Seconds.", buckets=[1.0], registry=registry).observe(0.5)
    assert snapshot(registry, "sampler") == (
        MetricFamily(
            "heterorl_node_g",
            "counter",
            "Groups.",
            (MetricSample("heterorl_node_g_total", {"verdict": "stale"}, 3.0),),
        ),
        MetricFamily(
            "heterorl_node_v",
            "gauge",
            "Versions.",
            (MetricSample("heterorl_node_v", {}, 7.0),),
        ),
        MetricFamily(
            "heterorl_node_seconds",
            "histogram",
            "Seconds.",
            (
                MetricSample("heterorl_node_seconds_bucket", {"le": "1.0"}, 1.0),
                MetricSample("heterorl_node_seconds_bucket", {"le": "+Inf"}, 1.0),
                MetricSample("heterorl_node_seconds_count", {}, 1.0),
                MetricSample("heterorl_node_seconds_sum", {}, 0.5),
            ),
        ),
    )


def test_what_others_sent_us_and_what_is_not_ours_is_never_sent_on(registry: CollectorRegistry) -> None:
    Gauge("heterorl_node_v", "Another peer's.", ["node", "role"], registry=registry).labels("n", "r").set(1)
    Gauge("elsewhere_x", "Not ours.", registry=registry).set(1)
    Summary("heterorl_node_summary", "Of a type that does not travel.", registry=registry).observe(1)
    assert snapshot(registry, "sampler") == ()


def test_a_snapshot_never_has_more_families_than_a_heartbeat_carries(
    registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(limits.METRIC_FAMILIES_PER_HEARTBEAT + 2):
        Gauge(f"heterorl_node_{number}", "One of many.", registry=registry).set(number)
    assert len(snapshot(registry, "sampler")) == limits.METRIC_FAMILIES_PER_HEARTBEAT
    (record,) = caplog.records
    assert vars(record)["left_out_families"] == 2


def test_a_family_past_the_limit_of_samples_is_left_out_whole(registry: CollectorRegistry) -> None:
    many = Counter("heterorl_node_many", "One label value too many.", ["of"], registry=registry)
    for number in range(limits.METRIC_SAMPLES_PER_HEARTBEAT + 1):
        many.labels(str(number)).inc()
    Gauge("heterorl_node_one", "Still fits.", registry=registry).set(1)
    assert families(registry).keys() == {"heterorl_node_one"}


def test_own_and_re_exported_samples_of_one_name_are_one_family(registry: CollectorRegistry) -> None:
    class Fleet(Collector):
        def collect(self) -> Iterator[Metric]:
            metric = Metric("heterorl_node_v", "A peer's.", "gauge")
            metric.add_sample("heterorl_node_v", {"node": "n"}, 2.0)
            yield metric

    Gauge("heterorl_node_v", "Our own.", registry=registry).set(1)
    registry.register(Fleet())
    lines = [line for line in exposition(registry).decode().splitlines() if "heterorl_node_v" in line]
    assert lines == [
        "# HELP heterorl_node_v Our own.",
        "# TYPE heterorl_node_v gauge",
        "heterorl_node_v 1.0",
        'heterorl_node_v{node="n"} 2.0',
    ]


def test_a_process_says_what_it_runs_and_how_much_memory_it_takes(registry: CollectorRegistry) -> None:
    NodeMetrics(registry, roles=["coordinator", "learner"], clock=ManualClock())
    (sample,) = families(registry)["heterorl_node_info"].samples
    assert sample.labels["roles"] == "coordinator+learner"
    assert sample.labels["version"]
    assert b"process_resident_memory_bytes" in exposition(registry)


def test_refusals_are_counted_by_service_and_reason(registry: CollectorRegistry) -> None:
    metrics = NodeMetrics(registry, roles=["coordinator"], clock=ManualClock())
    for _ in range(2):
        metrics.count_refusal(service="RolloutService", reason=Reason.WRONG_BASE)
    (sample,) = families(registry)["heterorl_node_refusals"].samples
    assert sample == MetricSample(
        "heterorl_node_refusals_total", {"service": "RolloutService", "reason": "wrong_base"}, 2.0
    )


def test_a_wait_is_visible_while_it_lasts_and_counted_when_it_ends(registry: CollectorRegistry) -> None:
    clock = ManualClock()
    metrics = NodeMetrics(registry, roles=["sampler"], clock=clock)
    assert metrics.waits_for == ""
    with metrics.waiting("prompt lease"):
        with metrics.waiting("policy version"):
            clock.advance(2)
            assert metrics.waits_for == "prompt lease"
        clock.advance(3)
        labels = {"for": "prompt lease"}
        assert registry.get_sample_value("heterorl_node_waiting_tasks", labels) == 1
    assert metrics.waits_for == ""
    assert registry.get_sample_value("heterorl_node_waiting_tasks", labels) == 0
    assert registry.get_sample_value("heterorl_node_wait_seconds_total", labels) == 5


def test_a_wait_that_fails_has_ended(registry: CollectorRegistry) -> None:
    metrics = NodeMetrics(registry, roles=["sampler"], clock=ManualClock())
    with pytest.raises(RuntimeError), metrics.waiting("prompt lease"):
        raise RuntimeError
    assert metrics.waits_for == ""


def test_waits_of_other_threads_count_too(registry: CollectorRegistry) -> None:
    metrics = NodeMetrics(registry, roles=["learner"], clock=ManualClock())
    entered, leave = threading.Event(), threading.Event()

    def wait() -> None:
        with metrics.waiting("rollout group"):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=wait)
    thread.start()
    assert entered.wait(10)
    assert metrics.waits_for == "rollout group"
    leave.set()
    thread.join()
    assert metrics.waits_for == ""


def test_the_time_until_a_certificate_expires_runs_with_the_clock(registry: CollectorRegistry) -> None:
    clock = ManualClock(1000.0)
    metrics = NodeMetrics(registry, roles=["sampler"], clock=clock)
    metrics.watch_certificate("sampler", not_after_s=1100.0)
    metrics.watch_certificate("authority", not_after_s=9000.0)

    def left(name: str) -> float | None:
        return registry.get_sample_value("heterorl_node_certificate_expiry_seconds", {"certificate": name})

    assert (left("sampler"), left("authority")) == (100.0, 8000.0)
    clock.advance(150.0)
    assert left("sampler") == -50.0
    assert "heterorl_node_certificate_expiry_seconds" in families(registry)


def test_of_a_gauge_with_very_many_samples_the_largest_travel(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_module, "SAMPLES_PER_FAMILY", 2)
    gauge = Gauge("heterorl_sampler_mismatch", "Nats.", ["sampler"], registry=registry)
    for number, value in enumerate((1.0, 3.0, math.nan, 2.0)):
        gauge.labels(f"s{number}").set(value)
    samples = families(registry)["heterorl_sampler_mismatch"].samples
    assert {sample.labels["sampler"]: sample.value for sample in samples} == {"s1": 3.0, "s3": 2.0}
