"""Whose metrics a scrape of the coordinator shows when there are more peers than places."""

import logging

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from node.coordinator.fleet.membership import GONE_AFTER_S
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.peers import HeartbeatReport, Peers
from node.coordinator.work.accounts import Balance
from node.identity.peer import Peer
from node.policy import PolicyVersion
from node.run import Role
from node.telemetry.fleet_collector import METRICS_EVERY_S, SAMPLERS, FleetCollector
from node.telemetry.metrics import MetricFamily, MetricSample, exposition
from support.coordinator import LEARNER, NOW_S, make_accounts

SILENT_AFTER_S = 10.0
LEARNER_PEER = Peer("run", Role.LEARNER, "late-learner")
RELAY = Peer("run", Role.RELAY, "late-relay")


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

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        fleet = FleetCollector()
        self.registry.register(fleet)
        self.peers = Peers(
            make_accounts(Balance(learner=LEARNER)),
            silent_after_s=SILENT_AFTER_S,
            head=lambda: PolicyVersion(3),
            revoked=tuple,
            fleet=fleet,
            metrics=CoordinatorMetrics(self.registry),
        )

    def join(self, *peers: Peer, now: float = NOW_S) -> None:
        for peer in peers:
            self.peers.join(peer, None, now=now)
            self.heartbeat(peer, now=now)

    def heartbeat(self, *peers: Peer, now: float = NOW_S) -> None:
        for peer in peers:
            self.peers.heartbeat(peer, HeartbeatReport(None, 0.0, "", metrics=METRICS[peer.role]), now=now)

    def scrape(self) -> tuple[set[str], float]:
        """Return whose metrics are shown, and how many samplers have none."""
        shown, left_out = set(), 0.0
        for family in text_string_to_metric_families(exposition(self.registry).decode()):
            for sample in family.samples:
                if family.name in {metrics[0].name for metrics in METRICS.values()}:
                    shown.add(sample.labels["node"])
                elif family.name == "heterorl_coordinator_fleet_peers_left_out":
                    left_out = sample.value
        return shown, left_out


@pytest.fixture
def run() -> Run:
    return Run()


def test_the_learner_is_shown_when_it_joins_as_the_1001st(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.join(*map(sampler, range(1000)))
    run.join(LEARNER_PEER, RELAY)
    shown, left_out = run.scrape()
    assert {"late-learner", "late-relay"} <= shown
    assert shown >= {f"s{n}" for n in range(SAMPLERS)}
    assert len(shown) == SAMPLERS + 2
    assert left_out == 1000 - SAMPLERS
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.message for record in told] == ["more samplers than the metrics show"]


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


def test_the_metrics_of_a_peer_without_a_place_need_not_be_read(run: Run) -> None:
    run.join(*map(sampler, range(SAMPLERS + 1)))
    assert run.peers.shows_metrics_of(sampler(0))
    assert not run.peers.shows_metrics_of(sampler(SAMPLERS))
    beat = HeartbeatReport(None)
    assert run.peers.heartbeat(sampler(0), beat, now=NOW_S).metrics_every_s == METRICS_EVERY_S
    assert run.peers.heartbeat(sampler(SAMPLERS), beat, now=NOW_S).metrics_every_s is None
    run.join(LEARNER_PEER)
    assert run.peers.shows_metrics_of(LEARNER_PEER)
