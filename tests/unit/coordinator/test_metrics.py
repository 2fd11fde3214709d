"""A scrape of the coordinator."""

from dataclasses import replace

from prometheus_client import CollectorRegistry

from node.coordinator.fleet.membership import PeerState
from node.coordinator.fleet.survey import SHOWN_SAMPLERS, FleetSurvey, Measured, Surveyor
from node.coordinator.metrics import CoordinatorMetrics
from node.identity.peer import Peer
from node.values.evaluation import Evaluation, EvaluationStatus
from node.values.roles import Role

SAMPLER = Peer("run", Role.SAMPLER, "s1")
MEASURED = Measured(3, 7.5, 30.0, -90.0)


def survey(*seen: tuple[Peer, PeerState, Measured]) -> FleetSurvey:
    surveyor = Surveyor(max_staleness_versions=8, run_grader=b"")
    for peer, state, measured in seen:
        surveyor.see(peer, state, measured)
    return surveyor.result()


def shown(found: FleetSurvey) -> CollectorRegistry:
    registry = CollectorRegistry()
    CoordinatorMetrics(registry).show_fleet(found)
    return registry


def test_a_peers_lag_is_shown_until_it_has_left() -> None:
    labels = {"node": "s1", "role": "sampler"}
    registry = shown(survey((SAMPLER, PeerState.LIVE, MEASURED)))
    assert registry.get_sample_value("heterorl_coordinator_peer_version_lag_versions", labels) == 3
    assert registry.get_sample_value("heterorl_coordinator_peer_lag_seconds", labels) == 7.5
    assert registry.get_sample_value("heterorl_coordinator_peer_silence_seconds", labels) == 30.0
    assert registry.get_sample_value("heterorl_coordinator_peer_clock_offset_seconds", labels) == -90.0
    registry = shown(survey((SAMPLER, PeerState.LEFT, MEASURED)))
    assert registry.get_sample_value("heterorl_coordinator_peer_lag_seconds", labels) is None


def test_a_role_without_peers_is_shown_as_none_rather_than_not_at_all() -> None:
    other = Peer("run", Role.SAMPLER, "s2")
    registry = shown(survey((SAMPLER, PeerState.LIVE, MEASURED), (other, PeerState.LIVE, MEASURED)))

    def peers(role: str, state: str) -> float | None:
        return registry.get_sample_value("heterorl_coordinator_peers", {"role": role, "state": state})

    assert (peers("sampler", "live"), peers("sampler", "silent"), peers("learner", "live")) == (2, 0, 0)


def test_quantiles_are_over_all_samplers_and_the_worst_have_names() -> None:
    fleet = [
        (Peer("run", Role.SAMPLER, f"t{n}"), PeerState.LIVE, Measured(n, float(n), 0.0, float(-n)))
        for n in range(100)
    ]
    learner = (Peer("run", Role.LEARNER, "l"), PeerState.LIVE, Measured(0, 0.0, 0.0, 0.0))
    registry = shown(survey(learner, *fleet))

    def fleet_lag(quantile: str) -> float | None:
        labels = {"quantile": quantile}
        return registry.get_sample_value("heterorl_coordinator_fleet_version_lag_versions", labels)

    assert [fleet_lag(one) for one in ("0", "0.5", "0.9", "1")] == [0, 49, 89, 99]
    assert registry.get_sample_value("heterorl_coordinator_fleet_version_lag_versions_count") == 100
    assert (
        registry.get_sample_value("heterorl_coordinator_fleet_clock_offset_seconds", {"quantile": "0.5"})
        == -49
    )
    named = {
        sample.labels["node"]
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "heterorl_coordinator_peer_version_lag_versions"
    }
    first = range(SHOWN_SAMPLERS)
    assert named == {"l", *(f"t{n}" for n in (*first, *range(90, 100)))}


def test_the_newest_evaluation_is_shown_and_nothing_of_it_before_there_is_one() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"heterorl_coordinator_evaluation_{name}")

    names = ("version", "reward_mean", "cut_ratio", "best_version", "waiting_prompts")
    assert [value(name) for name in names] == [None] * 5
    best = Evaluation(10, 0, 8, 1, 0.0, 32, 1.0, 2.0, counted_prompts=8, reward_mean=0.75, cut_ratio=0.25)
    newest = replace(best, version=20, reward_mean=0.5)
    under_way = Evaluation(30, 0, 8, 1, 0.0, 32, 3.0, counted_prompts=3)
    metrics.evaluations.status = EvaluationStatus(newest, best, best, under_way)
    assert [value(name) for name in names] == [20, 0.5, 0.25, 10, 5]
    unanswered = replace(newest, counted_prompts=7, reward_mean=None, cut_ratio=None)
    metrics.evaluations.status = EvaluationStatus(unanswered, best, best, under_way)
    assert [value(name) for name in names] == [20, None, None, 10, 5]
