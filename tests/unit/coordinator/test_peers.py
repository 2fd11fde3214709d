"""Reports of peers, and what they are told."""

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from node.coordinator.fleet import membership as membership_module
from node.coordinator.fleet.heartbeats import JITTER
from node.coordinator.fleet.peer_reports import HeartbeatReport, Joining, LearnerReport
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.peers import peers as peers_module
from node.coordinator.peers.peer_table import PeerTable
from node.coordinator.peers.peers import Peers
from node.coordinator.run_status import changes_of
from node.coordinator.work.balance import Balance
from node.coordinator.work.version_log import Announced
from node.errors import RefusedError
from node.identity.peer import Peer
from node.values.groups.verdict import GroupVerdict, Verdict
from node.values.policy import PolicyVersion
from node.values.roles import Role
from node.values.run import PeerQuery
from support.coordinator import LEARNER, NOW_S, make_accounts

SAMPLER = Peer("run", Role.SAMPLER, "s1")
HEAD = PolicyVersion(3, b"r" * 16)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def peers(registry: CollectorRegistry) -> Peers:
    log = (Announced(1, b"q" * 16, NOW_S - 50), Announced(3, HEAD.root, NOW_S - 20))
    accounts = make_accounts(Balance(facts=(LEARNER,), announced=log))
    metrics = CoordinatorMetrics(registry)
    peers = Peers(
        accounts,
        silent_after_s=10,
        heartbeat_interval_s=2.0,
        head=lambda: HEAD,
        metrics=metrics,
        random=lambda: 1.0,
    )
    peers.join(SAMPLER, Joining(None), now=NOW_S)
    return peers


def heartbeat(held: PolicyVersion | None = None, *, has_heard: bool = True) -> HeartbeatReport:
    return HeartbeatReport(held=held, clock_offset_s=0.25, waits_for="prompt lease", has_heard=has_heard)


@pytest.mark.parametrize(
    ("held", "must_repair"),
    [
        (None, False),
        (HEAD, False),
        (PolicyVersion(3, b"x" * 16), True),
        (PolicyVersion(1, b"x" * 16), True),
        (PolicyVersion(3), False),  # says the number only
        (PolicyVersion(2, b"x" * 16), False),  # never announced: nothing to compare with
    ],
)
def test_a_peer_whose_root_is_not_the_signed_one_must_repair(
    peers: Peers, held: PolicyVersion | None, must_repair: bool
) -> None:
    assert peers.heartbeat(SAMPLER, heartbeat(held), now=NOW_S).must_repair is must_repair


def test_the_learner_hears_how_far_behind_the_last_sampler_is_that_holds_a_version(peers: Peers) -> None:
    learner, relay = Peer("run", Role.LEARNER, "learner"), Peer("run", Role.RELAY, "r")
    samplers = [Peer("run", Role.SAMPLER, f"s{n}") for n in (1, 2, 3)]
    for peer, held in ((learner, 3), (relay, 1), *zip(samplers, (1, 2, 0), strict=True)):
        peers.join(peer, Joining(PolicyVersion(held)), now=NOW_S)

    def longest() -> int:
        news = peers.heartbeat(learner, HeartbeatReport(HEAD, learner=LearnerReport()), now=NOW_S).learner
        assert news is not None
        return news.longest_lag_versions

    assert longest() == 2
    peers.leave(samplers[0])
    assert longest() == 1
    peers.heartbeat(samplers[1], heartbeat(HEAD), now=NOW_S)
    assert longest() == 0


def test_verdicts_reach_their_sampler_once_in_order_as_many_as_a_heartbeat_carries(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "VERDICTS_PER_HEARTBEAT", 2)
    told = [GroupVerdict(f"{n}.1", Verdict.ACCEPTED) for n in range(3)]
    for judgement in told:
        peers.notify("s1", judgement)
    assert peers.heartbeat(SAMPLER, heartbeat(), now=NOW_S).verdicts == tuple(told[:2])
    assert peers.heartbeat(SAMPLER, heartbeat(), now=NOW_S).verdicts == tuple(told[2:])
    assert peers.heartbeat(SAMPLER, heartbeat(), now=NOW_S).verdicts == ()


def test_a_learner_of_the_samplers_name_does_not_get_its_verdicts(peers: Peers) -> None:
    learner = Peer("run", Role.LEARNER, "s1")
    peers.join(learner, Joining(None), now=NOW_S)
    peers.notify("s1", GroupVerdict("0.1", Verdict.STALE))
    assert peers.heartbeat(learner, heartbeat(), now=NOW_S).verdicts == ()


def test_verdicts_for_a_sampler_that_does_not_heartbeat_are_dropped_oldest_first_and_counted(
    peers: Peers, registry: CollectorRegistry
) -> None:
    for number in range(peers_module.PENDING_VERDICTS + 1):
        peers.notify("s1", GroupVerdict(f"{number}.1", Verdict.ACCEPTED))
    assert registry.get_sample_value("heterorl_coordinator_dropped_verdicts_total") == 1
    told = peers.heartbeat(SAMPLER, heartbeat(), now=NOW_S).verdicts
    assert [one.group_id for one in told[:2]] == ["1.1", "2.1"]


def test_a_row_says_what_the_peer_holds_waits_for_and_how_far_behind_it_is(peers: Peers) -> None:
    peers.heartbeat(SAMPLER, heartbeat(PolicyVersion(1)), now=NOW_S)
    (row,), _ = PeerTable(peers, revoked=tuple).page(PeerQuery(), NOW_S + 5)
    assert (row.version_lag_versions, row.lag_s, row.last_seen_s) == (2, 25.0, 5.0)
    assert (row.state, row.waits_for, row.clock_offset_s, row.joins) == ("live", "prompt lease", 0.25, 1)


def test_a_verifier_holds_no_version_and_is_never_behind(peers: Peers) -> None:
    verifier = Peer("run", Role.VERIFIER, "v1")
    peers.join(verifier, Joining(None), now=NOW_S)
    peers.heartbeat(verifier, heartbeat(None), now=NOW_S)
    rows, _ = PeerTable(peers, revoked=tuple).page(PeerQuery(sort_by="behind"), NOW_S + 5)
    lags = {row.node_id: (row.version_lag_versions, row.lag_s) for row in rows}
    assert lags["v1"] == (0, 0.0)
    assert rows[0].node_id == "s1"
    assert lags["s1"][0] > 0


def test_a_verifier_says_which_grader_is_the_runs(peers: Peers) -> None:
    verifier, other = Peer("run", Role.VERIFIER, "v"), Peer("run", Role.VERIFIER, "w")
    peers.join(SAMPLER, Joining(None, grader_digest=b"x" * 16), now=NOW_S)
    peers.join(verifier, Joining(None, grader_digest=b"h" * 16), now=NOW_S)
    peers.join(other, Joining(None, grader_digest=b"x" * 16), now=NOW_S)
    assert peers.objection_to_grader(verifier) == ""
    for peer in (SAMPLER, other):
        assert "verifier v" in peers.objection_to_grader(peer)
    peers.leave(verifier)
    assert peers.objection_to_grader(SAMPLER) == ""  # the one that is left has the sampler's
    peers.heartbeat(other, heartbeat(), now=NOW_S)
    peers.expire(NOW_S + 11)  # it is silent
    assert peers.objection_to_grader(SAMPLER) == ""
    peers.join(verifier, Joining(None, grader_digest=b"h" * 16), now=NOW_S + 12)
    assert "verifier v" in peers.objection_to_grader(SAMPLER)
    peers.heartbeat(other, heartbeat(), now=NOW_S + 13)  # back, and it says what nobody else does
    assert "verifier v" in peers.objection_to_grader(other)


def fleet_of(peers: Peers, *, samplers: int) -> None:
    peers.leave(SAMPLER)
    for number in range(samplers):
        peer = Peer("run", Role.SAMPLER, f"t{number}")
        peers.join(peer, Joining(None), now=NOW_S + number)
        report = HeartbeatReport(
            PolicyVersion(number % 4), clock_offset_s=-number, waits_for="disk" if number % 2 else "learner"
        )
        peers.heartbeat(peer, report, now=NOW_S + number)


def names(peers: Peers, **query: Any) -> list[str]:
    rows, _ = PeerTable(peers, revoked=tuple).page(PeerQuery(**query), NOW_S + 10)
    return [row.node_id for row in rows]


def test_what_an_operator_changed_in_the_learner_is_unusual(peers: Peers) -> None:
    learner = Peer("run", Role.LEARNER, "learner")
    peers.join(learner, Joining(None), now=NOW_S)
    assert not changes_of(peers)
    changes = ("learning_rate 0.001 -> 0.0005 since step 41",)
    peers.heartbeat(learner, HeartbeatReport(held=None, learner=LearnerReport(changes=changes)), now=NOW_S)
    [unusual] = changes_of(peers)
    assert (unusual.what, unusual.peers, unusual.node_ids) == (f"learner with {changes[0]}", 1, ("learner",))


def test_leases_go_by_the_groups_of_a_version_as_the_learner_says_now(peers: Peers) -> None:
    learner, bounds = Peer("run", Role.LEARNER, "learner"), peers.accounts.terms.bounds
    peers.join(learner, Joining(None), now=NOW_S)
    for said, batch_groups in (
        (0, bounds.batch_groups),
        (bounds.batch_groups * 8,) * 2,
        (0, bounds.batch_groups),
    ):
        report = LearnerReport(version_groups=said)
        peers.heartbeat(learner, HeartbeatReport(held=None, learner=report), now=NOW_S)
        assert peers.accounts.bounds == replace(bounds, batch_groups=batch_groups)


def test_pages_have_each_peer_once_in_the_order_of_joining(peers: Peers) -> None:
    fleet_of(peers, samplers=6)
    pages = [names(peers, offset=offset, limit=3) for offset in (0, 3, 6, 9)]
    assert pages == [["s1", "t0", "t1"], ["t2", "t3", "t4"], ["t5"], []]
    assert PeerTable(peers, revoked=tuple).page(PeerQuery(limit=3), NOW_S)[1] == 7


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"states": ("left",)}, ["s1"]),
        ({"roles": ("learner", "relay")}, []),
        ({"name": "t", "waits_for": "dis"}, ["t1", "t3", "t5"]),
        ({"standings": ("newcomer",), "states": ("live",)}, [f"t{n}" for n in range(6)]),
        ({"standings": ("hoards",)}, []),
        ({"sort_by": "name", "is_reversed": True, "limit": 2}, ["t5", "t4"]),
        ({"sort_by": "joined", "is_reversed": True, "limit": 2}, ["t5", "t4"]),
        ({"sort_by": "behind", "name": "t"}, ["t0", "t4", "t1", "t5", "t2", "t3"]),
        ({"sort_by": "lag", "name": "t"}, ["t0", "t4", "t1", "t2", "t5", "t3"]),
        ({"sort_by": "seen", "name": "t", "limit": 2}, ["t0", "t1"]),
        ({"sort_by": "clock", "limit": 2}, ["t5", "t4"]),
        ({"sort_by": "clock", "is_reversed": True, "name": "t", "limit": 2}, ["t0", "t1"]),
        ({"sort_by": "state", "limit": 3}, ["t0", "t1", "t2"]),
        ({"sort_by": "state", "offset": 6}, ["s1"]),
        ({"sort_by": "leases", "name": "t", "limit": 2}, ["t0", "t1"]),
    ],
)
def test_peers_are_filtered_and_sorted(peers: Peers, query: dict[str, Any], expected: list[str]) -> None:
    fleet_of(peers, samplers=6)
    assert names(peers, **query) == expected


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"states": ("asleep",)}, "states = 'asleep'"),
        ({"roles": ("operator",)}, "roles = 'operator'"),
        ({"standings": ("x",)}, "standings = 'x'"),
        ({"states": ("live",) * 9}, "states = 9"),
        ({"sort_by": "age"}, "sort_by = 'age'"),
        ({"offset": -1}, "from the -1th on"),
        ({"limit": 1001}, "a page of 1001 peers"),
    ],
)
def test_a_query_that_nothing_can_meet_is_refused_with_what_is_allowed(
    peers: Peers, query: dict[str, Any], said: str
) -> None:
    with pytest.raises(RefusedError) as refused:
        PeerTable(peers, revoked=tuple).page(PeerQuery(**query), NOW_S)
    assert said in str(refused.value)


def test_a_peer_that_is_forgotten_leaves_nothing_behind(
    peers: Peers, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "PEERS_REMEMBERED", 3)
    fleet_of(peers, samplers=6)
    peers.notify("t0", GroupVerdict("0.1", Verdict.ACCEPTED))
    for number in range(4):
        peers.leave(Peer("run", Role.SAMPLER, f"t{number}"))
    peers.expire(NOW_S + 7)
    assert names(peers) == ["t3", "t4", "t5"]
    assert registry.get_sample_value("heterorl_coordinator_dropped_verdicts_total") == 1
    assert peers.live(Role.SAMPLER) == 2


@pytest.mark.parametrize(
    ("samplers", "least_s", "expected_s"),
    [(100, 1.0, 1.0), (5000, 1.0, 5.0 * (1 + JITTER)), (5000, 9.0, 9.0)],
)
def test_idle_samplers_ask_for_leases_more_seldom_the_more_they_are(
    peers: Peers, samplers: int, least_s: float, expected_s: float
) -> None:
    for number in range(samplers - 1):
        peers.join(Peer("run", Role.SAMPLER, f"t{number}"), Joining(None), now=NOW_S)
    assert peers.lease_pause_s(least_s) == pytest.approx(expected_s)  # random is 1
