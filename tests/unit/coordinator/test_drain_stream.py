"""What is sent next on a learner's stream."""

import pytest

from node.coordinator.drain_stream import DrainStream
from node.errors import RefusedError
from support.coordinator import Desk


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    for lease_id in desk.lease("s1", 3):
        desk.submit(lease_id)
    return desk


def next_numbers(drain: DrainStream, desk: Desk) -> list[int]:
    numbers = []
    while (slot := drain.next_slot(desk.accounts.slots.untrained())) is not None:
        numbers.append(slot.number)
    return numbers


def test_each_group_is_sent_once_oldest_first_as_far_as_credits_go(desk: Desk) -> None:
    drain = DrainStream((), learner_epoch=1)
    drain.add_credits(2)
    assert next_numbers(drain, desk) == [0, 1]
    drain.add_credits(2)
    assert next_numbers(drain, desk) == [2]


def test_a_group_the_learner_holds_is_not_sent(desk: Desk) -> None:
    drain = DrainStream(["1.1", "nonsense"], learner_epoch=1)
    drain.add_credits(9)
    assert next_numbers(drain, desk) == [0, 2]


def test_a_stream_that_lasts_for_months_remembers_only_groups_that_can_still_be_sent(desk: Desk) -> None:
    drain = DrainStream((), learner_epoch=1)
    drain.add_credits(1000)
    version = 0
    for _ in range(100):
        for slot in desk.accounts.slots.untrained():
            version += 1
            desk.train(version, f"{slot.number}.{slot.winner}")
        for lease_id in desk.lease("s1", 2, held=version):
            desk.submit(lease_id)
        next_numbers(drain, desk)
    assert len(drain._sent) == len(desk.accounts.slots.untrained()) == 2


def test_newer_acknowledgements_replace_older_ones() -> None:
    drain = DrainStream((), learner_epoch=1)
    drain.acknowledge(3)
    drain.acknowledge(4)
    assert drain.take_acknowledgement() == 4
    assert drain.take_acknowledgement() is None


@pytest.mark.parametrize("groups", [0, -1, 1 << 20])
def test_credits_are_numbers_of_groups_a_learner_may_have_room_for(groups: int) -> None:
    drain = DrainStream((), learner_epoch=1)
    drain.add_credits(1)
    with pytest.raises(RefusedError):
        drain.add_credits(groups)
