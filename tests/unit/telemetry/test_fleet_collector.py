"""A peer's metrics that are shown, and those that never are."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from node.identity.peer import Peer
from node.run import Role
from node.telemetry import fleet_collector as fleet_module
from node.telemetry import metric_layout
from node.telemetry.fleet_collector import FleetCollector
from node.telemetry.metrics import MetricFamily, MetricSample

S1, S2 = (Peer("run", Role.SAMPLER, name) for name in ("s1", "s2"))
TOKENS = "heterorl_sampler_tokens"


def family(
    value: float = 1.0, *, name: str = TOKENS, type: str = "counter", suffix: str = "_total", **labels: str
) -> MetricFamily:
    return MetricFamily(name, type, "Tokens.", (MetricSample(name + suffix, labels, value),))


def shown(fleet: FleetCollector) -> dict[tuple[str, str], float]:
    samples = (sample for metric in fleet.collect() for sample in metric.samples)
    return {(s.name, s.labels["node"]): s.value for s in samples if "node" in s.labels}


@pytest.fixture
def fleet() -> FleetCollector:
    return FleetCollector()


def test_each_peers_samples_carry_its_name_and_role(fleet: FleetCollector) -> None:
    fleet.update(S1, [family(5, kind="x")])
    metric = next(metric for metric in fleet.collect() if metric.name == TOKENS)
    assert metric.samples[0].labels == {"node": "s1", "role": "sampler", "kind": "x"}


def test_peers_of_one_metric_share_one_family_that_prometheus_can_read(fleet: FleetCollector) -> None:
    fleet.update(S1, [family(5)])
    fleet.update(S2, [family(7)])
    registry = CollectorRegistry()
    registry.register(fleet)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    read = next(family for family in families if family.name == TOKENS)
    assert {s.labels["node"]: s.value for s in read.samples} == {"s1": 5.0, "s2": 7.0}


def test_the_newest_heartbeat_replaces_the_one_before(fleet: FleetCollector) -> None:
    fleet.update(S1, [family(5), family(name="heterorl_sampler_gone")])
    fleet.update(S1, [family(6)])
    assert shown(fleet) == {(TOKENS + "_total", "s1"): 6.0}


def test_a_peer_that_is_dropped_disappears(fleet: FleetCollector) -> None:
    fleet.update(S1, [family()])
    fleet.drop(S1)
    fleet.drop(S2)
    assert shown(fleet) == {}


@pytest.mark.parametrize(
    "bad",
    [
        family(name="heterorl_coordinator_groups"),
        family(name="heterorl_learner_loss"),
        family(name="process_cpu_seconds"),
        family(name="heterorl_sampler_"),
        family(name="heterorl_sampler_Ä"),
        family(name=TOKENS + "\nx"),
        family(node="s2"),
        family(role="learner"),
        MetricFamily(TOKENS, "counter", "", (MetricSample(TOKENS + "_total", {"bad-label": "x"}, 1),)),
        family(kind="x" * 201),
        family(suffix="_sum"),
        family(type="gauge"),
        family(type="untyped"),
        MetricFamily(TOKENS, "counter", "", (MetricSample("heterorl_coordinator_groups_total", {}, 1),)),
        MetricFamily(TOKENS, "counter", "", (MetricSample(TOKENS + "_total", {}, 1),) * 2),
    ],
)
def test_a_family_that_breaks_a_rule_is_passed_over_and_counted(
    fleet: FleetCollector, bad: MetricFamily
) -> None:
    fleet.update(S1, [bad, family(2, name="heterorl_sampler_good")])
    assert shown(fleet) == {("heterorl_sampler_good_total", "s1"): 2.0}
    assert fleet.refused.total() == 1


def test_a_family_sent_twice_is_shown_once(fleet: FleetCollector) -> None:
    fleet.update(S1, [family(1), family(2)])
    assert shown(fleet) == {(TOKENS + "_total", "s1"): 1.0}


def test_a_peer_that_disagrees_on_a_type_does_not_change_it(fleet: FleetCollector) -> None:
    fleet.update(S1, [family(1)])
    fleet.update(S2, [family(2, type="gauge", suffix="")])
    assert shown(fleet) == {(TOKENS + "_total", "s1"): 1.0}


def test_samples_of_a_peer_and_peers_by_name_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(metric_layout.SAMPLES_PER_PEER, Role.SAMPLER, 1)
    monkeypatch.setitem(fleet_module.SHOWN, Role.SAMPLER, 1)
    fleet = FleetCollector()
    fleet.update(S1, [family(), family(name="heterorl_sampler_more")])
    fleet.update(S2, [family()])
    fleet.update(S1, [family(9)])
    assert shown(fleet) == {(TOKENS + "_total", "s1"): 9.0}
    assert fleet.refused == {"samples": 1}


def test_a_peer_without_room_for_its_series_is_left_out_whole_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "SERIES", 6)  # four of them sums
    fleet = FleetCollector()
    fleet.update(S1, [family(1, kind=kind) for kind in "a"])
    fleet.update(
        S2, [family(1), family(2, name="heterorl_sampler_more"), family(3, name="heterorl_sampler_most")]
    )
    assert set(shown(fleet)) == {(TOKENS + "_total", "s1")}
    values = {metric.name: metric.samples[0].value for metric in fleet.collect() if metric.samples}
    assert values["heterorl_coordinator_fleet_peers_without_room"] == 1


def test_of_samplers_that_are_not_shown_the_worst_are_named_with_what_alerts_ask_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(fleet_module.SHOWN, Role.SAMPLER, 0)
    monkeypatch.setattr(fleet_module, "WORST_NAMED", 2)
    starving, free = "heterorl_sampler_starving_seconds", "heterorl_node_disk_free_ratio"
    fleet = FleetCollector()
    for number, value in enumerate((0.0, 400.0, 20.0, 7.0)):
        gauges = [family(value, name=name, type="gauge", suffix="") for name in (starving, free)]
        fleet.update(Peer("run", Role.SAMPLER, f"s{number}"), gauges)
    assert shown(fleet) == {
        (starving, "s1"): 400.0,
        (starving, "s2"): 20.0,
        (free, "s0"): 0.0,
        (free, "s3"): 7.0,
    }
