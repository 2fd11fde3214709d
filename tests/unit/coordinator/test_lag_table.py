"""Version lag and lag in seconds, by hand."""

import pytest

from node.coordinator.fleet.lag_table import Lag, LagTable
from node.coordinator.work import version_log
from node.coordinator.work.version_log import Announced, VersionLog
from node.identity.peer import Peer
from node.policy import PolicyVersion
from node.run import Role

PEER = Peer("run", Role.SAMPLER, "s1")


def lag(held: int | None, *, head: int | None, now: float = 100.0, announced: dict[int, float]) -> Lag:
    table = LagTable(VersionLog(Announced(number, b"r" * 16, at_s) for number, at_s in announced.items()))
    table.holds(PEER, None if held is None else PolicyVersion(held))
    return table.lag(PEER, head=None if head is None else PolicyVersion(head), now=now)


ANNOUNCED = {1: 10.0, 3: 30.0, 7: 70.0}


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        (7, Lag(0, 0.0)),
        (3, Lag(4, 30.0)),
        (2, Lag(5, 70.0)),  # 3 was the first newer one
        (1, Lag(6, 70.0)),
        (0, Lag(7, 90.0)),
        (None, Lag(8, 90.0)),
    ],
)
def test_lag_counts_from_the_first_newer_announcement(held: int | None, expected: Lag) -> None:
    assert lag(held, head=7, announced=ANNOUNCED) == expected


def test_a_peer_ahead_of_the_head_is_not_behind() -> None:
    assert lag(9, head=7, announced=ANNOUNCED) == Lag(0, 0.0)


def test_a_peer_that_holds_the_head_is_not_behind_whatever_was_announced_since() -> None:
    assert lag(3, head=3, announced=ANNOUNCED) == Lag(0, 0.0)


def test_before_the_first_version_nobody_is_behind() -> None:
    assert lag(None, head=None, announced={}) == Lag(0, 0.0)


def test_a_head_of_this_moment_is_a_version_away_and_no_time() -> None:
    assert lag(7, head=8, announced=ANNOUNCED) == Lag(1, 0.0)


def test_a_clock_set_back_makes_no_negative_lag() -> None:
    assert lag(3, head=7, now=60.0, announced=ANNOUNCED) == Lag(4, 0.0)


def test_the_longest_distance_is_that_of_the_sampler_furthest_behind_that_holds_a_version() -> None:
    table, head = LagTable(VersionLog()), PolicyVersion(9)
    assert table.longest(head=head) == 0
    samplers = [Peer("run", Role.SAMPLER, f"s{number}") for number in range(4)]
    for sampler, held in zip(samplers, (3, 3, 7, 0), strict=True):
        table.holds(sampler, PolicyVersion(held))
    table.holds(Peer("run", Role.RELAY, "r"), PolicyVersion(1))
    assert table.longest(head=head) == 6
    table.holds(samplers[0], PolicyVersion(1))
    assert table.longest(head=head) == 8
    table.holds(samplers[0], PolicyVersion(8))
    assert table.longest(head=head) == 6  # another one still holds version 3
    table.leave(samplers[1])
    assert table.longest(head=head) == 2
    assert table.held(samplers[1]) == PolicyVersion(3)
    table.forget(samplers[2])
    assert table.longest(head=head) == 1
    assert table.held(samplers[2]) is None
    assert table.longest(head=None) == 0
    assert table.longest(head=PolicyVersion(5)) == 0  # they are ahead of it


def test_a_version_keeps_its_first_time_and_root() -> None:
    log = VersionLog([Announced(1, b"a" * 16, 1.0)])
    log.add([Announced(1, b"b" * 16, 9.0)])
    assert (log.root_of(1), log.succeeded_at_s(0)) == (b"a" * 16, 1.0)


def test_the_log_forgets_the_oldest_versions_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_log, "VERSIONS_REMEMBERED", 2)
    log = VersionLog(Announced(number, b"", 0.0) for number in (3, 1, 2))
    assert [number in log for number in (1, 2, 3)] == [False, True, True]
    assert log.root_of(1) is None
