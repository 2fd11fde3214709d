"""A fleet of thousands: whose metrics a scrape names, how often peers speak, what a status takes."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from node.coordinator.fleet.membership import GONE_AFTER_S
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.peer_table import PeerTable
from node.coordinator.peers import HeartbeatReport, Peers
from node.coordinator.work.balance import Balance
from node.identity.peer import Peer
from node.policy import PolicyVersion
from node.run import Role
from node.telemetry.fleet_collector import METRICS_EVERY_S, SERIES, SHOWN, FleetCollector
from node.telemetry.metrics import MetricFamily, MetricSample, exposition
from support.coordinator import LEARNER, NOW_S, make_accounts

SILENT_AFTER_S = 10.0
LEARNER_PEER = Peer("run", Role.LEARNER, "late-learner")
RELAY = Peer("run", Role.RELAY, "late-relay")
SAMPLERS = SHOWN[Role.SAMPLER]


def sampler(number: int) -> Peer:
    return Peer("run", Role.SAMPLER, f"s{number}")


def gauge(name: str, value: float) -> tuple[MetricFamily, ...]:
    return (MetricFamily(name, "gauge", "", (MetricSample(name, {}, value),)),)


METRICS = {
    Role.LEARNER: gauge("heterorl_learner_kl_nats", 0.5),
    Role.RELAY: gauge("heterorl_relay_head_version", 3.0),
    Role.SAMPLER: gauge("heterorl_sampler_held_version", 2.0),
}


class Run:
    """A real peers with its exposition, and peers that join and send heartbeats."""

    def __init__(self, *picked: str, random: float = 0.5) -> None:
        self.registry = CollectorRegistry()
        fleet = FleetCollector(picked)
        self.registry.register(fleet)
        self.metrics = CoordinatorMetrics(self.registry)
        self.peers = Peers(
            make_accounts(Balance(facts=(LEARNER,))),
            silent_after_s=SILENT_AFTER_S,
            heartbeat_interval_s=2.0,
            head=lambda: PolicyVersion(3),
            fleet=fleet,
            metrics=self.metrics,
            random=lambda: random,
        )
        self.table = PeerTable(self.peers, revoked=tuple)

    def join(self, *peers: Peer, now: float = NOW_S) -> None:
        for peer in peers:
            self.peers.join(peer, None, now=now)
            self.heartbeat(peer, now=now)

    def heartbeat(self, *peers: Peer, now: float = NOW_S) -> None:
        for peer in peers:
            self.peers.heartbeat(peer, HeartbeatReport(None), metrics=METRICS[peer.role], now=now)

    def scrape(self) -> tuple[set[str], float]:
        """Return whose metrics are shown by name, and how many samplers are not."""
        shown, left_out = set(), 0.0
        for family in text_string_to_metric_families(exposition(self.registry).decode()):
            for sample in family.samples:
                if family.name in {metrics[0].name for metrics in METRICS.values()}:
                    shown.add(sample.labels["node"])
                elif family.name == "heterorl_coordinator_fleet_peers_left_out":
                    left_out += sample.value
        return shown, left_out


@pytest.fixture
def run() -> Run:
    return Run()


def test_the_learner_is_shown_when_it_joins_as_the_1001st(run: Run) -> None:
    run.join(*map(sampler, range(1000)))
    run.join(LEARNER_PEER, RELAY)
    shown, left_out = run.scrape()
    assert shown == {"late-learner", "late-relay", *(f"s{n}" for n in range(SAMPLERS))}
    assert left_out == 1000 - SAMPLERS


def test_a_sampler_that_an_operator_picks_is_shown_though_it_joins_last_and_returns_when_it_was_cut_off() -> (
    None
):
    run = Run("s999")
    run.join(*map(sampler, range(1000)))
    expected = {"s999", *(f"s{n}" for n in range(SAMPLERS - 1))}
    assert run.scrape()[0] == expected
    run.peers.leave(sampler(999))
    assert "s999" not in run.scrape()[0]
    run.join(sampler(999))
    assert run.scrape()[0] == expected


def test_ten_times_the_samplers_make_no_series_more(run: Run) -> None:
    def series() -> int:
        for _ in run.table.survey_parts(NOW_S):
            pass
        run.metrics.show_fleet(run.table.survey)
        return sum(not line.startswith("#") for line in exposition(run.registry).decode().splitlines())

    run.join(*map(sampler, range(200)))
    few = series()
    run.join(*map(sampler, range(200, 2000)))
    run.peers.expire(NOW_S)
    assert series() == few < SERIES


def test_heartbeats_and_reports_of_a_fleet_are_as_many_a_second_however_large_it_is() -> None:
    run = Run(random=1.0)
    run.join(LEARNER_PEER, *map(sampler, range(4999)))

    def answer(peer: Peer) -> tuple[float | None, float]:
        said = run.peers.heartbeat(peer, HeartbeatReport(None), now=NOW_S)
        return said.next_heartbeat_s, said.metrics_every_s

    pause_s, metrics_every_s = answer(sampler(0))
    assert pause_s is None
    assert metrics_every_s == pytest.approx(25.0)
    run.peers.expire(NOW_S)
    assert answer(sampler(0))[0] == pytest.approx(5.0 * 1.2)
    assert answer(LEARNER_PEER)[0] is None  # it is one, and everybody waits for it
    run.peers.expire(NOW_S + 14.9)  # three pauses: not SILENT_AFTER_S
    assert run.peers.live(Role.SAMPLER) == 4999
    for number in range(100, 4999):
        run.peers.leave(sampler(number))
    run.peers.expire(NOW_S + 9)
    assert answer(sampler(0)) == (None, METRICS_EVERY_S)


def test_a_fleet_is_looked_at_in_parts_and_the_larger_the_more_seldom(run: Run) -> None:
    run.join(*map(sampler, range(2000)))
    assert len(list(run.table.survey_parts(NOW_S))) == 4
    assert list(run.table.survey_parts(NOW_S + 1.9)) == []
    assert len(list(run.table.survey_parts(NOW_S + 2))) == 4


def test_a_sampler_that_leaves_frees_its_place_for_the_next_that_is_heard(run: Run) -> None:
    run.join(*map(sampler, range(SAMPLERS + 2)))
    run.peers.leave(sampler(7))
    run.heartbeat(sampler(SAMPLERS), sampler(SAMPLERS + 1))
    shown, left_out = run.scrape()
    assert "s7" not in shown
    assert f"s{SAMPLERS}" in shown
    assert f"s{SAMPLERS + 1}" not in shown
    assert left_out == 1


@pytest.mark.parametrize("silence_s", [SILENT_AFTER_S + 1, GONE_AFTER_S + 1])
def test_a_peer_that_is_not_heard_of_is_not_shown_and_frees_its_place(run: Run, silence_s: float) -> None:
    run.join(*map(sampler, range(SAMPLERS + 1)))
    later = NOW_S + silence_s
    living = [sampler(n) for n in range(SAMPLERS + 1) if n != 3]
    run.heartbeat(*living, now=later)
    run.peers.expire(later)
    run.heartbeat(*living, now=later)
    shown, left_out = run.scrape()
    assert shown == {peer.node_id for peer in living}
    assert left_out == 0


def test_a_peer_that_comes_back_after_a_cut_is_shown_again(run: Run) -> None:
    run.join(LEARNER_PEER)
    later = NOW_S + SILENT_AFTER_S + 1
    run.peers.expire(later)
    assert run.scrape()[0] == set()
    run.heartbeat(LEARNER_PEER, now=later)
    assert run.scrape()[0] == {"late-learner"}


def test_a_peer_sends_its_metrics_whole_until_it_is_known_what_they_are_of(run: Run) -> None:
    run.peers.join(sampler(0), None, now=NOW_S)

    def wants(**metrics: Any) -> bool:
        said = run.peers.heartbeat(sampler(0), HeartbeatReport(None), now=NOW_S, **metrics)
        return said.wants_whole_metrics

    assert wants()
    assert wants(metric_values=[5.0])
    assert not wants(metrics=METRICS[Role.SAMPLER])
    assert not wants(metric_values=[7.0])
    labels = {"node": "s0", "role": "sampler"}
    assert run.registry.get_sample_value("heterorl_sampler_held_version", labels) == 7.0
    assert not wants(metric_values=[1.0, 2.0])  # not as many as it said: passed over
    assert run.registry.get_sample_value("heterorl_sampler_held_version", labels) == 7.0
