"""A fleet of thousands: whom a scrape names, how often peers speak, what a status takes."""

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from node.coordinator.fleet.peer_reports import HeartbeatReport, Joining
from node.coordinator.fleet.survey import SHOWN_SAMPLERS
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.peers.peer_table import PeerTable
from node.coordinator.peers.peers import Peers
from node.coordinator.work.balance import Balance
from node.identity.peer import Peer
from node.telemetry.metrics import exposition
from node.values.peer_figures import MachineFigures, SamplerFigures
from node.values.policy import PolicyVersion
from node.values.roles import Role
from support.coordinator import LEARNER, NOW_S, make_accounts

SILENT_AFTER_S = 10.0
SERIES = 4000
LEARNER_PEER = Peer("run", Role.LEARNER, "late-learner")
RELAY = Peer("run", Role.RELAY, "late-relay")


def sampler(number: int) -> Peer:
    return Peer("run", Role.SAMPLER, f"s{number}")


def report(peer: Peer, *, starving_s: float = 0.0, disk: float = 0.5) -> HeartbeatReport:
    is_sampler = peer.role is Role.SAMPLER
    work = SamplerFigures(starving_s, tokens_per_s=100.0) if is_sampler else None
    return HeartbeatReport(None, machine=MachineFigures(disk_free_ratio=disk), sampler=work)


class Run:
    """Real peers with their exposition, that join and send heartbeats."""

    def __init__(self, *, random: float = 0.5) -> None:
        self.registry = CollectorRegistry()
        self.metrics = CoordinatorMetrics(self.registry)
        self.peers = Peers(
            make_accounts(Balance(facts=(LEARNER,))),
            silent_after_s=SILENT_AFTER_S,
            heartbeat_interval_s=2.0,
            head=lambda: PolicyVersion(3),
            metrics=self.metrics,
            random=lambda: random,
        )
        self.table = PeerTable(self.peers, revoked=tuple)

    def join(self, *peers: Peer, now: float = NOW_S) -> None:
        for peer in peers:
            self.peers.join(peer, Joining(None), now=now)
            self.peers.heartbeat(peer, report(peer), now=now)

    def scrape(self, *, now: float = NOW_S) -> str:
        """Look at all peers, and return what /metrics shows then."""
        for _ in self.table.survey_parts(now):
            pass
        self.metrics.show_fleet(self.table.survey)
        return exposition(self.registry).decode()

    def named(self, metric: str, *, now: float = NOW_S) -> dict[str, float]:
        """Return whose number is shown by name."""
        families = text_string_to_metric_families(self.scrape(now=now))
        samples = (one for family in families for one in family.samples)
        return {one.labels["node"]: one.value for one in samples if one.name == metric}


@pytest.fixture
def run() -> Run:
    return Run()


DISK = "heterorl_coordinator_peer_disk_free_ratio"
STARVING = "heterorl_coordinator_peer_starving_seconds"


def test_the_learner_and_relays_are_named_though_they_join_last(run: Run) -> None:
    run.join(*map(sampler, range(1000)))
    run.join(LEARNER_PEER, RELAY)
    first = {f"s{n}" for n in range(SHOWN_SAMPLERS)}
    assert run.named(DISK).keys() == {"late-learner", "late-relay", *first}


def test_a_sampler_that_an_alert_is_about_is_named_however_many_there_are(run: Run) -> None:
    run.join(*map(sampler, range(1000)))
    run.peers.heartbeat(sampler(900), report(sampler(900), starving_s=400.0), now=NOW_S)
    run.peers.heartbeat(sampler(901), report(sampler(901), disk=0.01), now=NOW_S)
    assert run.named(STARVING)["s900"] == 400.0
    assert run.named(DISK, now=NOW_S + 5)["s901"] == 0.01


def test_the_whole_fleet_is_a_summary(run: Run) -> None:
    run.join(*map(sampler, range(100)))
    run.scrape()
    value = run.registry.get_sample_value
    assert value("heterorl_coordinator_fleet_tokens_per_second_sum") == 100 * 100.0
    assert value("heterorl_coordinator_fleet_disk_free_ratio", {"quantile": "0.5"}) == 0.5


def test_numbers_of_a_peer_that_is_silent_or_left_are_not_shown(run: Run) -> None:
    run.join(sampler(0), sampler(1), LEARNER_PEER)
    later = NOW_S + SILENT_AFTER_S + 1
    run.peers.heartbeat(sampler(1), report(sampler(1)), now=later)
    run.peers.expire(later)
    assert run.named(DISK, now=later).keys() == {"s1"}
    run.peers.leave(sampler(1))
    assert run.named(DISK, now=later + 5) == {}


def test_ten_times_the_samplers_make_no_series_more(run: Run) -> None:
    def series(now: float) -> int:
        return sum(not line.startswith("#") for line in run.scrape(now=now).splitlines())

    run.join(*map(sampler, range(200)))
    few = series(NOW_S)
    run.join(*map(sampler, range(200, 2000)))
    run.peers.expire(NOW_S)
    assert series(NOW_S + 5) == few < SERIES


def test_heartbeats_of_a_fleet_are_as_many_a_second_however_large_it_is() -> None:
    run = Run(random=1.0)
    run.join(LEARNER_PEER, *map(sampler, range(4999)))

    def pause_s(peer: Peer) -> float | None:
        return run.peers.heartbeat(peer, HeartbeatReport(None), now=NOW_S).next_heartbeat_s

    assert pause_s(sampler(0)) is None
    run.peers.expire(NOW_S)
    assert pause_s(sampler(0)) == pytest.approx(5.0 * 1.2)
    assert pause_s(LEARNER_PEER) is None  # it is one, and everybody waits for it
    run.peers.expire(NOW_S + 14.9)  # three pauses: not SILENT_AFTER_S
    assert run.peers.live(Role.SAMPLER) == 4999
    for number in range(100, 4999):
        run.peers.leave(sampler(number))
    run.peers.expire(NOW_S + 9)
    assert pause_s(sampler(0)) is None


def test_a_fleet_is_looked_at_in_parts_and_the_larger_the_more_seldom(run: Run) -> None:
    run.join(*map(sampler, range(2000)))
    assert len(list(run.table.survey_parts(NOW_S))) == 4
    assert list(run.table.survey_parts(NOW_S + 1.9)) == []
    assert len(list(run.table.survey_parts(NOW_S + 2))) == 4
