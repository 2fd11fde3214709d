"""The orders of open slots against sets and dictionaries that are looked through whole."""

from hypothesis import given
from hypothesis import strategies as st

from node.coordinator.work.slots.open_slots import LowestFirst

NUMBERS = st.integers(0, 30)


@given(st.lists(st.tuples(st.booleans(), NUMBERS), max_size=400))
def test_numbers_come_lowest_first_whatever_was_added_and_removed(changes: list[tuple[bool, int]]) -> None:
    ours, naive = LowestFirst(), set[int]()
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
