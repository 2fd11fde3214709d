"""How thin checking is, and a room that is shared out."""

import pytest

from node.coordinator.work.checks.check_tally import LEAST_DRAWN, CheckTally
from node.coordinator.work.checks.open_checks import SharedRoom


def note(tally: CheckTally, name: str, *, groups: int, drawn: int, checked: int) -> None:
    for n in range(groups):
        tally.note_group(name, is_drawn=n < drawn)
    for _ in range(checked):
        tally.note_checked(name)


def test_checking_is_thin_where_less_than_half_of_what_was_drawn_was_checked_and_the_worst_comes_first() -> (
    None
):
    tally = CheckTally()
    note(tally, "well", groups=100, drawn=10, checked=9)
    note(tally, "few", groups=LEAST_DRAWN - 1, drawn=LEAST_DRAWN - 1, checked=0)
    note(tally, "badly", groups=20, drawn=20, checked=4)
    note(tally, "not", groups=20, drawn=10, checked=0)
    assert [one.sampler_id for one in tally.thin()] == ["not", "badly"]
    assert str(tally.thin()[1]).startswith("badly (20.")
    assert "% of its groups in place of 100.0%)" in str(tally.thin()[1])


def test_old_groups_fade_so_that_checks_that_are_made_again_end_it() -> None:
    tally = CheckTally()
    note(tally, "s1", groups=300, drawn=300, checked=0)
    assert tally.thin()
    for _ in range(600):
        note(tally, "s1", groups=1, drawn=1, checked=1)
    assert tally.thin() == ()


@pytest.mark.parametrize("peers", [1, 2, 5])
def test_of_peers_that_take_all_they_may_each_has_a_part_and_as_much_is_left(peers: int) -> None:
    room = SharedRoom(60)
    while any(room.has_room(str(n)) for n in range(peers)):
        for n in range(peers):
            if room.has_room(str(n)):
                room.take(str(n))
    assert {room.of(str(n)) for n in range(peers)} == {60 // (peers + 1)}
    assert room.most - room.total == 60 // (peers + 1)
    assert room.has_room("later", 60 // (peers + 1))


def test_what_is_given_back_is_there_for_others() -> None:
    room = SharedRoom(4)
    room.take("a", 2)
    assert not room.has_room("a")
    room.take("a", -2)
    assert (room.total, room.of("a"), room.has_room("b", 4)) == (0, 0, True)
