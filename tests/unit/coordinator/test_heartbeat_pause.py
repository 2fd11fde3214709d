"""Pauses between heartbeats: the configured interval in a small fleet, a steady stream in a large one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.coordinator.fleet.heartbeats import HEARTBEATS_PER_S, JITTER, drawn_pause_s, pause_s, silence_s


@pytest.mark.parametrize(
    ("interval_s", "peers", "lease_ttl_s", "expected_s"),
    [
        (2.0, 0, 120.0, 2.0),
        (2.0, 2000, 120.0, 2.0),
        (2.0, 3000, 120.0, 3.0),
        (2.0, 10_000, 120.0, 10.0),
        (2.0, 1_000_000, 120.0, 30.0),  # a lease lasts four pauses
        (2.0, 10_000, 4.0, 2.0),
        (60.0, 10_000, 120.0, 60.0),
    ],
)
def test_a_fleet_sends_at_most_so_many_a_second_while_its_leases_are_renewed_in_time(
    interval_s: float, peers: int, lease_ttl_s: float, expected_s: float
) -> None:
    assert pause_s(interval_s=interval_s, peers=peers, lease_ttl_s=lease_ttl_s) == expected_s
    assert peers / expected_s <= HEARTBEATS_PER_S or expected_s in (lease_ttl_s / 4, interval_s)


@given(st.floats(0.05, 300), st.floats(0, 1, exclude_max=True))
def test_each_pause_is_near_the_mean_and_spread_on_both_sides(mean_s: float, random: float) -> None:
    assert abs(drawn_pause_s(mean_s, random) - mean_s) <= JITTER * mean_s * (1 + 1e-9)
    assert (drawn_pause_s(mean_s, random) < mean_s) == (random < 0.5)


def test_a_peer_may_miss_a_few_heartbeats_before_it_is_silent() -> None:
    assert silence_s(configured_s=20.0, pause_s=2.0) == 20.0
    assert silence_s(configured_s=20.0, pause_s=10.0) == 30.0
