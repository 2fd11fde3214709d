"""How much more may be sampled."""

from dataclasses import replace
from typing import Any

import pytest

from node.coordinator.work.capacity import Bounds, Load, capacity, is_full


def room(
    *,
    running: int = 0,
    untrained: int = 0,
    version: int = 0,
    behind: int = 0,
    **changes: Any,
) -> tuple[int, str]:
    bounds = Bounds(
        concurrency_groups=100,
        buffer_groups=100,
        batch_groups=4,
        max_staleness_versions=2,
        buffer_bytes=1 << 20,
    )
    load = Load(running, untrained, version, untrained_bytes=untrained * 100)
    found = capacity(replace(bounds, **changes), load, behind_versions=behind)
    return found.groups, found.bound


@pytest.mark.parametrize(("behind", "groups"), [(0, 12), (1, 8), (2, 4), (3, 0)])
@pytest.mark.parametrize("version", [3, 1000])
def test_the_staleness_bound_lets_groups_in_for_the_steps_within_reach(
    version: int, behind: int, groups: int
) -> None:
    # (S + 1 - behind) * B with S = 2 and B = 4
    assert room(version=version, behind=behind) == (groups, "staleness")


def test_every_group_on_its_way_counts_against_the_staleness_bound() -> None:
    assert room(running=3, untrained=2, version=1) == (12 - 5, "staleness")


def test_the_groups_of_a_version_fit_into_the_buffer() -> None:
    assert room(untrained=5, batch_groups=150, concurrency_groups=1000) == (145, "buffer")
    whole = Bounds(1000, 100, batch_groups=150, max_staleness_versions=2, buffer_bytes=1 << 20)
    assert [
        is_full(whole, untrained_groups=groups, untrained_bytes=14_900, group_bytes=100)
        for groups in (149, 150)
    ] == [False, True]


def test_the_tightest_bound_gives_the_number_and_its_name() -> None:
    assert room(running=3, concurrency_groups=5) == (2, "concurrency")
    assert room(untrained=3, running=1, buffer_groups=6) == (2, "buffer")


def test_groups_are_leased_as_far_as_their_bytes_fit_and_always_a_batch() -> None:
    assert room(untrained=5, running=1, buffer_bytes=800) == (2, "bytes")
    assert room(untrained=8, buffer_bytes=800) == (0, "bytes")
    assert room(untrained=2, running=1, buffer_bytes=100) == (1, "bytes")


def test_an_overdrawn_bound_gives_no_room_rather_than_less_than_none() -> None:
    assert room(untrained=9, buffer_groups=6) == (0, "buffer")


@pytest.mark.parametrize("behind", [0, 1, 2])
@pytest.mark.parametrize("groups", [[4] * 50, [32] * 50, [4] * 10 + [32] * 10 + [16] * 30])
def test_nothing_within_the_bound_can_be_staler_than_allowed(behind: int, groups: list[int]) -> None:
    """A version takes the oldest groups; each was leased as soon as there was room.

    Contributors that come make a version take more at once, and those that leave fewer: what is on its way
    then is staler.
    """
    begun_with: list[int] = []
    stalest = []
    for version, consumed in enumerate(groups):
        held = max(0, version - behind)
        free, _ = room(
            running=len(begun_with),
            version=version,
            behind=version - held,
            batch_groups=consumed,
            concurrency_groups=1000,
        )
        begun_with += [held] * free
        assert len(begun_with) >= consumed, "nobody starves"
        stalest.append(version - min(begun_with[:consumed]))
        del begun_with[:consumed]
    assert max(stalest[:20]) == max(stalest[30:]) == 2
