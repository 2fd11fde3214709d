"""Versions announced when, and how far behind a peer is, by hand."""

import pytest

from node.coordinator.work import version_log
from node.coordinator.work.version_log import Announced, VersionLog
from node.values.policy import PolicyVersion


def lag(
    held: int | None, *, head: int | None, now: float = 100.0, announced: dict[int, float]
) -> tuple[int, float]:
    log = VersionLog(Announced(number, b"r" * 16, at_s) for number, at_s in announced.items())
    held_version = None if held is None else PolicyVersion(held)
    return log.lag(held_version, None if head is None else PolicyVersion(head), now=now)


ANNOUNCED = {1: 10.0, 3: 30.0, 7: 70.0}


@pytest.mark.parametrize(
    ("held", "head", "now", "expected"),
    [
        (7, 7, 100.0, (0, 0.0)),
        (3, 7, 100.0, (4, 30.0)),
        (2, 7, 100.0, (5, 70.0)),  # 3 was the first newer one
        (1, 7, 100.0, (6, 70.0)),
        (0, 7, 100.0, (7, 90.0)),
        (None, 7, 100.0, (8, 90.0)),
        (9, 7, 100.0, (0, 0.0)),  # ahead of the head
        (3, 3, 100.0, (0, 0.0)),
        (None, None, 100.0, (0, 0.0)),
        (7, 8, 100.0, (1, 0.0)),  # announced this moment
        (3, 7, 60.0, (4, 0.0)),  # a clock set back
    ],
)
def test_lag_counts_from_the_first_newer_announcement(
    held: int | None, head: int | None, now: float, expected: tuple[int, float]
) -> None:
    assert lag(held, head=head, now=now, announced=ANNOUNCED) == expected


def test_a_version_keeps_its_first_time_and_root() -> None:
    log = VersionLog([Announced(1, b"a" * 16, 1.0)])
    log.add([Announced(1, b"b" * 16, 9.0)])
    assert (log.root_of(1), log.lag(None, PolicyVersion(1), now=9.0)) == (b"a" * 16, (2, 8.0))


def test_the_log_forgets_the_oldest_versions_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_log, "VERSIONS_REMEMBERED", 2)
    log = VersionLog(Announced(number, b"", 0.0) for number in (3, 1, 2))
    assert [number in log for number in (1, 2, 3)] == [False, True, True]
    assert log.root_of(1) is None
