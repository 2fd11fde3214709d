"""Unusual peers that a look at all of them finds."""

import pytest

from node.coordinator.fleet.membership import PeerState
from node.coordinator.fleet.survey import (
    NAMED_UNUSUAL,
    UNSAID_GRADER,
    WORST_SAMPLERS,
    FleetSurvey,
    Measured,
    Surveyor,
    survey_every_s,
)
from node.identity.peer import Peer
from node.values.protocol import Spoken
from node.values.roles import Role
from node.values.run import PeerCount, SamplerStanding, Unusual

FINE = Measured(0, 0.0, 1.0, 0.1)


def sampler(name: str) -> Peer:
    return Peer("run", Role.SAMPLER, name)


@pytest.fixture
def surveyor() -> Surveyor:
    return Surveyor(max_staleness_versions=8, run_grader=b"g")


def test_a_fleet_without_faults_has_nothing_unusual(surveyor: Surveyor) -> None:
    for number in range(3):
        surveyor.see(
            sampler(f"s{number}"), PeerState.LIVE, FINE, standing=SamplerStanding.ESTABLISHED, grader=b"g"
        )
    found = surveyor.result()
    assert found.unusual == ()
    assert found.peer_counts == (PeerCount(Role.SAMPLER, "live", 3),)


def test_what_is_unusual_is_counted_and_the_worst_are_named_first(surveyor: Surveyor) -> None:
    for number in range(20):
        surveyor.see(sampler(f"s{number}"), PeerState.SILENT, Measured(0, 0.0, float(number), 0.0))
    found = surveyor.result()
    assert found.unusual == (Unusual("sampler silent", 20, ("s19", "s18", "s17", "s16", "s15")),)
    assert len(found.unusual[0].node_ids) == NAMED_UNUSUAL


def test_each_fault_has_a_line_and_the_most_urgent_comes_first(surveyor: Surveyor) -> None:
    surveyor.see(sampler("behind"), PeerState.LIVE, Measured(9, 60.0, 1.0, 0.0))
    surveyor.see(sampler("hoards"), PeerState.LIVE, FINE, standing=SamplerStanding.HOARDS)
    surveyor.see(sampler("other"), PeerState.LIVE, FINE, grader=b"x")
    surveyor.see(sampler("twin"), PeerState.LIVE, FINE, twin_for_s=5.0)
    surveyor.see(sampler("old-twin"), PeerState.LIVE, FINE, twin_for_s=500.0)
    surveyor.see(sampler("slow"), PeerState.LIVE, Measured(0, 0.0, 1.0, 3600.0))
    surveyor.see(sampler("fast"), PeerState.LIVE, Measured(0, 0.0, 1.0, -61.0))
    surveyor.see(sampler("past"), PeerState.LIVE, FINE, speaks=Spoken(1, 1))
    surveyor.see(sampler("future"), PeerState.LIVE, FINE, speaks=Spoken(99, 1))
    surveyor.see(Peer("run", Role.LEARNER, "l"), PeerState.SILENT, FINE)
    found = {one.what: one.node_ids for one in surveyor.result().unusual}
    assert list(found.items()) == [
        ("learner silent", ("l",)),
        ("clock a minute or more behind", ("slow",)),
        ("clock a minute or more ahead", ("fast",)),
        ("second process of the same name refused", ("twin",)),
        ("grader code other than the run's, leased nothing", ("other",)),
        ("sampler in standing hoards", ("hoards",)),
        ("sampler behind by more than the staleness bound", ("behind",)),
        ("sampler of an older protocol: upgrade it", ("past",)),
        ("sampler of a newer protocol: upgrade the coordinator", ("future",)),
    ]


@pytest.mark.parametrize(("run_grader", "is_unsaid"), [(b"", True), (b"x", False)])
def test_samplers_that_grade_by_different_code_are_told_of_where_nobody_has_said_which_is_the_runs(
    run_grader: bytes, is_unsaid: bool
) -> None:
    surveyor = Surveyor(max_staleness_versions=8, run_grader=run_grader)
    for name, code in (("s1", b"x"), ("s2", b"x"), ("s3", b"y"), ("s4", b"")):
        surveyor.see(sampler(name), PeerState.LIVE, FINE, grader=code)
    surveyor.see(sampler("s5"), PeerState.SILENT, FINE, grader=b"z")
    found = surveyor.result()
    assert found.grader_codes == 2
    unsaid = [one for one in found.unusual if one.what == UNSAID_GRADER]
    assert unsaid == ([Unusual(UNSAID_GRADER, 3, ("s1", "s3", "s2"))] if is_unsaid else [])


def test_silent_samplers_do_not_take_the_places_of_those_that_lag_while_they_are_heard(
    surveyor: Surveyor,
) -> None:
    for number in range(30):
        surveyor.see(sampler(f"silent{number}"), PeerState.SILENT, Measured(900, 900.0, 900.0, 0.0))
    surveyor.see(sampler("lags"), PeerState.LIVE, Measured(5, 5.0, 1.0, 0.0))
    named = {peer.node_id: measured for peer, measured in surveyor.result().named}
    assert named["lags"].version_lag_versions == 5
    assert len(named) == WORST_SAMPLERS + 1


def test_clocks_are_those_of_all_peers(surveyor: Surveyor) -> None:
    surveyor.see(sampler("s"), PeerState.LIVE, Measured(0, 0.0, 0.0, 3600.0))
    surveyor.see(Peer("run", Role.LEARNER, "l"), PeerState.LIVE, Measured(0, 0.0, 0.0, -1.0))
    samplers = surveyor.result().samplers
    assert sorted(samplers["clock_offset_s"].tolist()) == [-1.0, 3600.0]
    assert len(samplers["lag_s"]) == 1


@pytest.mark.parametrize("state", [PeerState.LEFT, PeerState.REVOKED])
def test_peers_that_left_or_are_revoked_are_counted_and_nothing_else(
    surveyor: Surveyor, state: PeerState
) -> None:
    surveyor.see(sampler("gone"), state, Measured(99, 99.0, 99.0, 99.0))
    found: FleetSurvey = surveyor.result()
    assert found.peer_counts == (PeerCount(Role.SAMPLER, state.value, 1),)
    assert (found.unusual, found.named, found.samplers["lag_s"].tolist()) == ((), (), [])


def test_a_larger_fleet_is_looked_at_more_seldom() -> None:
    assert [survey_every_s(peers) for peers in (0, 1000, 10_000)] == [1.0, 1.0, 10.0]
