"""Reports of a relay about its samplers, and notices to them."""

from typing import Any

import pytest

from heterorl.v1 import common_pb2, membership_pb2, relay_pb2
from node.errors import Reason, RefusedError
from node.identity.peer import Peer
from node.limits import CARRIED_HEARTBEATS
from node.relay.sampler_sessions import UNHEARD_S, Sessions
from node.run import Role

ONE, TWO = (Peer("run", Role.SAMPLER, name) for name in ("one", "two"))


@pytest.fixture
def sessions() -> Sessions:
    sessions = Sessions()
    for number, peer in enumerate((ONE, TWO), start=1):
        sessions.open(peer, number, "first")
    return sessions


def heartbeat(
    sessions: Sessions, peer: Peer = ONE, *, has_heard: bool = True, instance: str = "first", **said: Any
) -> membership_pb2.HeartbeatResponse:
    request = membership_pb2.HeartbeatRequest(instance=instance, **said)
    return sessions.heard(peer, request, has_heard=has_heard)


def tell(sessions: Sessions, number: int = 1, **told: Any) -> None:
    notice = relay_pb2.CarriedNotice(session=number, told=membership_pb2.HeartbeatResponse(**told))
    assert sessions.told(notice) == 0


def verdict(group_id: str) -> membership_pb2.GroupVerdict:
    return membership_pb2.GroupVerdict(group_id=group_id, verdict=common_pb2.VERDICT_ACCEPTED)


def test_a_summary_has_each_sampler_heard_of_in_full_where_it_changed_and_by_number_where_not(
    sessions: Sessions,
) -> None:
    heartbeat(sessions, sequence=1, sent_at_s=1.0, waits_for="x" * 200, clock_offset_s=0.11)
    heartbeat(sessions, TWO, running_lease_ids=["0.1"])
    (first,) = sessions.summary(1)
    assert [one.session for one in first.heartbeats] == [1, 2]
    assert first.heartbeats[0].heartbeat == membership_pb2.HeartbeatRequest(
        waits_for="x" * 100, clock_offset_s=0.1
    )
    assert first.summary == 1
    heartbeat(sessions, sequence=2, sent_at_s=3.0, waits_for="x" * 200, clock_offset_s=0.09)
    heartbeat(sessions, TWO, running_lease_ids=["1.1"])
    (second,) = sessions.summary(2)
    assert list(second.unchanged) == [1]
    assert [one.session for one in second.heartbeats] == [2]
    (third,) = sessions.summary(3)  # nobody was heard of
    assert third == relay_pb2.CarryRequest(summary=3)


def test_a_large_summary_comes_in_parts_of_which_the_last_is_numbered() -> None:
    sessions = Sessions()
    for number in range(CARRIED_HEARTBEATS + 1):
        peer = Peer("run", Role.SAMPLER, f"s{number}")
        sessions.open(peer, number, "first")
        heartbeat(sessions, peer)
    parts = list(sessions.summary(7))
    assert [len(part.heartbeats) for part in parts] == [CARRIED_HEARTBEATS, 1]
    assert [part.summary for part in parts] == [0, 7]


def test_verdicts_are_repeated_until_they_are_heard_and_lost_leases_told_once(sessions: Sessions) -> None:
    tell(sessions, verdicts=[verdict("0.1")], lost_lease_ids=["1.1"])
    told = heartbeat(sessions, has_heard=False)
    assert [one.group_id for one in told.verdicts] == ["0.1"]
    assert list(told.lost_lease_ids) == ["1.1"]
    again = heartbeat(sessions, has_heard=False)
    assert [one.group_id for one in again.verdicts] == ["0.1"]
    assert not again.lost_lease_ids
    assert not heartbeat(sessions, has_heard=True).verdicts
    assert not heartbeat(sessions, TWO).verdicts


def test_a_doubt_about_a_version_is_told_only_to_a_sampler_that_still_holds_it(sessions: Sessions) -> None:
    old, new = (common_pb2.PolicyVersion(number=n, root=b"r" * 16) for n in (1, 2))
    heartbeat(sessions, held=old)
    list(sessions.summary(1))
    tell(sessions, must_repair=True)
    assert not heartbeat(sessions, held=new).must_repair
    heartbeat(sessions, held=old)
    list(sessions.summary(2))
    tell(sessions, must_repair=True)
    assert heartbeat(sessions, held=old).must_repair


def test_a_session_that_the_coordinator_ends_says_why_once(sessions: Sessions) -> None:
    why = relay_pb2.CarriedRefusal(reason=Reason.UNAUTHENTICATED, detail="one was revoked")
    sessions.told(relay_pb2.CarriedNotice(session=1, ended=why))
    with pytest.raises(RefusedError, match="revoked"):
        heartbeat(sessions)
    with pytest.raises(RefusedError) as refused:
        heartbeat(sessions)
    assert refused.value.reason is Reason.NOT_JOINED
    assert len(sessions) == 1


def test_another_process_of_a_name_and_one_that_never_joined_join_first(sessions: Sessions) -> None:
    for peer, instance in ((ONE, "second"), (Peer("run", Role.SAMPLER, "three"), "first")):
        with pytest.raises(RefusedError) as refused:
            heartbeat(sessions, peer, instance=instance)
        assert refused.value.reason is Reason.NOT_JOINED
    assert list(sessions.summary(1)) == [relay_pb2.CarryRequest(summary=1)]


def test_a_join_takes_the_place_of_the_session_before_it(sessions: Sessions) -> None:
    heartbeat(sessions)
    sessions.disconnected(ONE)
    sessions.open(ONE, 9, "second")
    assert sessions.take_disconnected() == []
    assert list(sessions.summary(1)) == [relay_pb2.CarryRequest(summary=1)]
    assert sessions.told(relay_pb2.CarriedNotice(session=1)) == 0  # too late
    assert sessions.leave(ONE) == 9


def test_a_sampler_that_is_not_heard_of_any_more_is_forgotten(sessions: Sessions) -> None:
    for now in (0.0, UNHEARD_S, 2 * UNHEARD_S):
        heartbeat(sessions)
        sessions.forget_unheard(now)
        assert list(sessions.summary(1)), now
    assert len(sessions) == 1
    with pytest.raises(RefusedError, match="join again"):
        heartbeat(sessions, TWO)
    heartbeat(sessions)
