"""Callers keep or lose their place when more callers come than there are places."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.rpc.strangers.places import NoPlaceError, PlaceLimits, Places, origin

LIMITS = PlaceLimits(connections=4, per_address=3, kept_s=5.0)


def with_connections(*connections: tuple[str, str, float]) -> "Places[str]":
    places = Places[str](LIMITS)
    for name, address, now in connections:
        assert places.enter(name, address, now=now) is None
    return places


def test_an_address_beyond_its_share_displaces_its_own_oldest() -> None:
    places = with_connections(("a1", "a", 0), ("a2", "a", 1), ("a3", "a", 2))
    assert places.enter("a4", "a", now=10) == "a1"
    assert places.enter("a5", "a", now=10) == "a2"
    assert len(places) == 3


def test_when_all_places_are_taken_the_address_with_the_most_loses_its_oldest() -> None:
    places = with_connections(("b1", "b", 0), ("a1", "a", 1), ("a2", "a", 2), ("c1", "c", 3))
    assert places.enter("d1", "d", now=10) == "a1"
    assert len(places) == 4


def test_a_young_connection_keeps_its_place_and_the_newcomer_gets_none() -> None:
    places = with_connections(("a1", "a", 0), ("a2", "a", 0), ("a3", "a", 0), ("b1", "b", 0))
    for address in ("a", "c"):
        with pytest.raises(NoPlaceError):
            places.enter("late", address, now=4.9)
    assert len(places) == 4
    assert places.enter("c1", "c", now=5) == "a1"


def test_a_place_that_is_left_is_free_and_leaving_twice_is_no_error() -> None:
    places = with_connections(("a1", "a", 0), ("a2", "a", 0), ("a3", "a", 0))
    places.leave("a2")
    places.leave("a2")
    assert places.enter("a4", "a", now=0) is None


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0, 3)), max_size=60))
def test_the_bounds_hold_whoever_comes(arrivals: list[tuple[str, float]]) -> None:
    places, now, there = Places[int](LIMITS), 0.0, dict[int, str]()
    for number, (address, pause) in enumerate(arrivals):
        now += pause
        try:
            displaced = places.enter(number, address, now=now)
        except NoPlaceError:
            continue
        if displaced is not None:
            del there[displaced]
        there[number] = address
        assert len(places) == len(there) <= LIMITS.connections
        assert all(list(there.values()).count(each) <= LIMITS.per_address for each in there.values())


@pytest.mark.parametrize(
    ("host", "counts_as"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_one_customer_is_one_address(host: str, counts_as: str) -> None:
    assert origin(host) == counts_as
