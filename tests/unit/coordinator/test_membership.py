"""Who is in the run, driven by the time given."""

import pytest

from node.coordinator.fleet import membership
from node.coordinator.fleet.membership import GONE_AFTER_S, Membership, PeerState
from node.errors import Reason, RefusedError
from node.identity.peer import Peer
from node.values.roles import MEMBER_ROLES, Role
from support.refusals import refused

PEER = Peer("run", Role.SAMPLER, "s1")


@pytest.fixture
def members() -> Membership:
    return Membership(silent_after_s=10)


def state(members: Membership, peer: Peer = PEER) -> PeerState:
    return next(member.state for member in members.members if member.peer == peer)


@pytest.mark.parametrize("how", ["leave", "silence"])
def test_a_peer_that_left_must_join_again(members: Membership, how: str) -> None:
    members.join(PEER, 0)
    if how == "leave":
        members.leave(PEER)
    else:
        assert [member.state for member in members.expire(GONE_AFTER_S + 1)] == [PeerState.LEFT]
    with pytest.raises(RefusedError):
        members.heartbeat(PEER, 1)
    assert members.join(PEER, 2).joins == 2
    members.heartbeat(PEER, 3)


def test_the_life_of_a_peer_goes_by_its_heartbeats_and_each_change_is_told_once(members: Membership) -> None:
    members.join(PEER, 0)
    assert state(members) is PeerState.JOINED
    for heard_s in (5, 100):  # when it is silent, it goes on
        members.heartbeat(PEER, heard_s)
        assert state(members) is PeerState.LIVE
        told = [[member.state for member in members.expire(heard_s + for_s)] for for_s in (10, 10.1, 11)]
        assert told == [[], [PeerState.SILENT], []]
    for for_s, told_now in ((0, []), (0.1, [PeerState.LEFT]), (1, [])):
        assert [member.state for member in members.expire(100 + GONE_AFTER_S + for_s)] == told_now


def test_peers_of_one_name_and_two_roles_are_two_peers(members: Membership) -> None:
    members.join(PEER, 0)
    with pytest.raises(RefusedError):
        members.heartbeat(Peer("run", Role.LEARNER, "s1"), 0)


def test_only_peers_that_left_are_forgotten_longest_gone_first(
    members: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "PEERS_REMEMBERED", 2)
    peers = [Peer("run", Role.SAMPLER, f"s{n}") for n in range(4)]
    for at_s, peer in enumerate(peers):
        members.join(peer, at_s)
    members.leave(peers[1])
    members.leave(peers[0])
    members.expire(5)
    assert [member.peer for member in members.members] == peers[2:]
    members.join(peers[0], 6)
    members.expire(7)
    assert len(members.members) == 3


@pytest.mark.parametrize("role", [one for one in MEMBER_ROLES if one is not Role.LEARNER])
def test_a_name_belongs_to_the_process_that_is_here(members: Membership, role: Role) -> None:
    peer = Peer("run", role, "s1")
    members.join(peer, 0, instance="first")
    for now in (1.0, 2.0):
        for come in (members.join, members.heartbeat):
            with refused(Reason.NAME_IN_USE, "1.0 s"):
                come(peer, now, instance="second")
        members.heartbeat(peer, now, instance="first")
    (member,) = members.members
    assert (member.instance, member.joins, member.state) == ("first", 1, PeerState.LIVE)
    assert (member.refused_twins, member.refused_twin_at_s) == (4, 2.0)


def test_a_name_is_taken_for_as_long_as_its_process_may_be_silent(members: Membership) -> None:
    members.join(PEER, 0, instance="first")
    with pytest.raises(RefusedError):
        members.join(PEER, 10, instance="second")
    assert members.join(PEER, 10.1, instance="second").instance == "second"


def test_a_clock_that_goes_back_holds_no_name_until_it_is_as_late_again(members: Membership) -> None:
    members.join(PEER, 5000, instance="first")
    members.expire(1000)
    with pytest.raises(RefusedError):
        members.join(PEER, 1010, instance="second")
    assert members.join(PEER, 1010.1, instance="second").instance == "second"


@pytest.mark.parametrize("how", ["leave", "stream ended", "silence", "silence before the next look"])
def test_a_name_is_free_when_its_process_is_gone_and_whoever_had_it_must_join_again(
    members: Membership, how: str
) -> None:
    members.join(PEER, 0, instance="first")
    members.heartbeat(PEER, 1, instance="first")
    now = 1.5
    if how == "leave":
        members.leave(PEER)
    elif how == "stream ended":
        members.disconnected(PEER)
    else:
        now = 11.1
        if how == "silence":
            assert [member.state for member in members.expire(now)] == [PeerState.SILENT]
    assert members.join(PEER, now, instance="second").joins == 2
    members.heartbeat(PEER, now, instance="second")
    with refused(Reason.NAME_IN_USE):
        members.heartbeat(PEER, now, instance="first")
    members.disconnected(PEER)
    with refused(Reason.NOT_JOINED):
        members.heartbeat(PEER, now, instance="first")


def test_a_stream_that_goes_on_is_a_connection_again(members: Membership) -> None:
    members.join(PEER, 0, instance="first")
    members.disconnected(PEER)
    members.heartbeat(PEER, 1, instance="first")
    with pytest.raises(RefusedError):
        members.join(PEER, 2, instance="second")


@pytest.mark.parametrize(
    ("peer", "first", "second"),
    [(PEER, "", "b"), (PEER, "a", ""), (Peer("run", Role.LEARNER, "learner"), "a", "b")],
    ids=["older first", "older second", "learners have epochs"],
)
def test_who_cannot_be_told_apart_is_let_in(members: Membership, peer: Peer, first: str, second: str) -> None:
    members.join(peer, 0, instance=first)
    members.heartbeat(peer, 1, instance=first)
    assert members.join(peer, 2, instance=second).joins == 2


def test_what_is_said_once_the_settings_are_known_belongs_to_the_same_join(members: Membership) -> None:
    members.join(PEER, 0)
    members.heartbeat(PEER, 1)
    assert members.join(PEER, 2, completes=True).joins == 1
    assert state(members) is PeerState.LIVE
    assert members.join(PEER, 3, completes=True).joins == 2
    assert state(members) is PeerState.JOINED
    members.leave(PEER)
    assert members.join(PEER, 4, completes=True).joins == 3


def test_what_another_process_says_of_the_settings_is_a_join_of_its_own(members: Membership) -> None:
    members.join(PEER, 0, instance="first")
    members.disconnected(PEER)
    assert members.join(PEER, 1, instance="second", completes=True).joins == 2


def test_a_join_that_is_completed_after_a_cut_holds_the_name_again(members: Membership) -> None:
    members.join(PEER, 0, instance="first")
    members.disconnected(PEER)
    assert members.join(PEER, 1, instance="first", completes=True).joins == 1
    with pytest.raises(RefusedError):
        members.join(PEER, 2, instance="second")
