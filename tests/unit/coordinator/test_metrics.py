"""What a scrape of the coordinator finds."""

from dataclasses import replace

from prometheus_client import CollectorRegistry

from node.coordinator.metrics import CoordinatorMetrics
from node.run import Evaluation, EvaluationStatus, PeerStatus, Role

ROW = PeerStatus("s1", Role.SAMPLER, "live", None, 3, 7.5, 0.0, 0.0, "", {}, 0.0, 1, 0, 0.0)


def test_a_peers_lag_is_shown_until_it_has_left() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)
    labels = {"node": "s1", "role": "sampler"}
    metrics.show_peers((ROW,), head=3)
    assert registry.get_sample_value("heterorl_coordinator_peer_version_lag_versions", labels) == 3
    assert registry.get_sample_value("heterorl_coordinator_peer_lag_seconds", labels) == 7.5
    metrics.show_peers((replace(ROW, state="left"),), head=3)
    assert registry.get_sample_value("heterorl_coordinator_peer_lag_seconds", labels) is None


def test_a_role_without_peers_is_shown_as_none_rather_than_not_at_all() -> None:
    registry = CollectorRegistry()
    CoordinatorMetrics(registry).show_peers((ROW, replace(ROW, node_id="s2")), head=0)

    def peers(role: str, state: str) -> float | None:
        return registry.get_sample_value("heterorl_coordinator_peers", {"role": role, "state": state})

    assert (peers("sampler", "live"), peers("sampler", "silent"), peers("learner", "live")) == (2, 0, 0)


def test_a_scrape_finds_how_long_a_peer_was_silent_and_how_far_its_clock_is_off() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)
    metrics.show_peers((replace(ROW, last_seen_s=30.0, clock_offset_s=-90.0),), head=3)
    labels = {"node": "s1", "role": "sampler"}
    assert registry.get_sample_value("heterorl_coordinator_peer_silence_seconds", labels) == 30.0
    assert registry.get_sample_value("heterorl_coordinator_peer_clock_offset_seconds", labels) == -90.0


def test_the_newest_evaluation_is_shown_and_nothing_of_it_before_there_is_one() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"heterorl_coordinator_evaluation_{name}")

    names = ("version", "reward_mean", "cut_ratio", "best_version", "waiting_prompts")
    assert [value(name) for name in names] == [None] * 5
    best = Evaluation(10, 0, 8, 1, 0.0, 32, 1.0, 2.0, 8, 0, 0.75, 0.1, 0.25, 9.0)
    newest = replace(best, version=20, reward_mean=0.5)
    under_way = Evaluation(30, 0, 8, 1, 0.0, 32, 3.0, counted_prompts=2, dropped_prompts=1)
    metrics.evaluations.status = EvaluationStatus(newest, best, best, under_way)
    assert [value(name) for name in names] == [20, 0.5, 0.25, 10, 5]
