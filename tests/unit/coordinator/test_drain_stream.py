"""What a learner's stream may carry next; which group that is, the leases say."""

import pytest

from node.coordinator.drain_stream import DrainStream
from node.errors import RefusedError


def test_groups_are_sent_as_far_as_credits_go() -> None:
    drain = DrainStream(learner_epoch=1)
    assert not drain.has_credit
    drain.add_credits(2)
    drain.take_credit()
    assert drain.has_credit
    drain.take_credit()
    assert not drain.has_credit
    drain.put_back_credit()
    assert drain.has_credit


def test_newer_acknowledgements_replace_older_ones() -> None:
    drain = DrainStream(learner_epoch=1)
    drain.acknowledge(3)
    drain.acknowledge(4)
    assert drain.take_acknowledgement() == 4
    assert drain.take_acknowledgement() is None


@pytest.mark.parametrize("groups", [0, -1, 1 << 20])
def test_credits_are_numbers_of_groups_a_learner_may_have_room_for(groups: int) -> None:
    drain = DrainStream(learner_epoch=1)
    drain.add_credits(1)
    with pytest.raises(RefusedError):
        drain.add_credits(groups)
