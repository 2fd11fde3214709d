import threading

import pytest
from prometheus_client import CollectorRegistry

from node.errors import Reason
from node.telemetry.metrics import NodeMetrics, create_registry, exposition
from support.clock import ManualClock


@pytest.fixture
def registry() -> CollectorRegistry:
    return create_registry()


def test_a_process_says_what_it_runs_and_how_much_memory_it_takes(registry: CollectorRegistry) -> None:
    NodeMetrics(registry, roles=["coordinator", "learner"], clock=ManualClock())
    shown = exposition(registry).decode()
    assert 'roles="coordinator+learner",version="' in shown
    assert "process_resident_memory_bytes" in shown


def test_refusals_are_counted_by_service_and_reason(registry: CollectorRegistry) -> None:
    metrics = NodeMetrics(registry, roles=["coordinator"], clock=ManualClock())
    for _ in range(2):
        metrics.count_refusal(service="RolloutService", reason=Reason.WRONG_BASE)
    labels = {"service": "RolloutService", "reason": "wrong_base"}
    assert registry.get_sample_value("heterorl_node_refusals_total", labels) == 2


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
