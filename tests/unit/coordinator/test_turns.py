"""Callers take turns, however many requests each has."""

from node.coordinator.transactions.request_queue import Turns


def test_callers_go_in_turn_and_the_requests_of_each_in_order() -> None:
    turns: Turns[str] = Turns()
    for request in ("a1", "a2", "a3", "b1", "c1", "b2"):
        turns.add(request[0], request)
    assert (len(turns), turns.of("a"), turns.of("x")) == (6, 3, 0)
    assert turns.remove("b", "b1")
    assert not turns.remove("b", "b1")
    assert not turns.remove("x", "b1")
    taken = []
    while turns:
        taken.append(turns.take())
    assert taken == ["a1", "b2", "c1", "a2", "a3"]
