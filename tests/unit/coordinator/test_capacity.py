"""How much more may be sampled."""

from dataclasses import replace
from typing import Any

import pytest

from node.coordinator.work.capacity import Bounds, Load, capacity


def room(
    *,
    running: int = 0,
    untrained: int = 0,
    trained: int = 0,
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
    load = Load(running, untrained, trained, version, untrained_bytes=untrained * 100)
    found = capacity(replace(bounds, **changes), load, behind_versions=behind)
    return found.groups, found.bound


@pytest.mark.parametrize(("version", "groups"), [(0, 12), (1, 16), (2, 20)])
def test_the_staleness_bound_lets_groups_in_for_the_steps_within_reach(version: int, groups: int) -> None:
    # (S + version + 1) * B with S = 2 and B = 4
    assert room(version=version) == (groups, "staleness")


def test_every_group_in_flight_or_trained_counts_against_the_staleness_bound() -> None:
    assert room(running=3, untrained=2, trained=4, version=1) == (16 - 9, "staleness")


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
def test_nothing_within_the_bound_can_be_staler_than_allowed(behind: int) -> None:
    """A step takes the four oldest groups; each was leased as soon as there was room."""
    begun_with: list[int] = []
    stalest = 0
    for version in range(50):
        held, trained = max(0, version - behind), 4 * version
        free, _ = room(
            running=len(begun_with) - trained, trained=trained, version=version, behind=version - held
        )
        begun_with += [held] * free
        assert len(begun_with) >= trained + 4
        stalest = max(stalest, *(version - number for number in begun_with[trained : trained + 4]))
    assert stalest == 2
