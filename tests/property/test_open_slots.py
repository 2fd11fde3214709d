"""The orders of open slots against sets and dictionaries that are looked through whole."""

from hypothesis import given
from hypothesis import strategies as st

from node.coordinator.work.open_slots import Deadlines, LowestFirst

NUMBERS = st.integers(0, 30)


@given(st.lists(st.tuples(st.booleans(), NUMBERS), max_size=400))
def test_numbers_come_lowest_first_whatever_was_added_and_removed(changes: list[tuple[bool, int]]) -> None:
    ours, naive = LowestFirst(), set()
    for is_added, number in changes:
        (ours.add if is_added else ours.discard)(number)
        (naive.add if is_added else naive.discard)(number)
        assert list(ours) == sorted(naive)
        assert len(ours) == len(naive)


def test_numbers_that_were_removed_take_no_room_for_long() -> None:
    numbers = LowestFirst()
    numbers.add(0)
    for number in range(1, 10_000):
        numbers.add(number)
        numbers.discard(number)
    assert len(numbers._heap) < 100


@given(
    st.lists(
        st.tuples(st.sampled_from(["set", "discard", "due", "settle"]), NUMBERS, st.integers(0, 20)),
        max_size=200,
    )
)
def test_deadlines_that_have_passed_are_found_until_they_are_discarded(
    changes: list[tuple[str, int, int]],
) -> None:
    ours, naive = Deadlines(), dict[int, float]()
    for what, number, at_s in changes:
        match what:
            case "set":
                ours.set(number, at_s)
                naive[number] = at_s
            case "discard":
                ours.discard(number)
                naive.pop(number, None)
            case _:
                passed = sorted(n for n, deadline_s in naive.items() if deadline_s <= at_s)
                assert ours.due(at_s) == passed
                for settled in passed if what == "settle" else ():
                    ours.discard(settled)
                    del naive[settled]


def test_leases_that_ended_early_take_no_room_for_long() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.set(number, 600.0 + number)
        deadlines.discard(number)
    assert len(deadlines._heap) < 100
