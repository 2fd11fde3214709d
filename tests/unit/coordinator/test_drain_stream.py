"""Messages that a learner's stream may carry next; the leases say which group that is."""

import pytest

from node.coordinator.drain_stream import DrainStream
from node.errors import RefusedError


@pytest.mark.parametrize("groups", [0, -1, 1 << 20])
def test_credits_are_numbers_of_groups_a_learner_may_have_room_for(groups: int) -> None:
    drain = DrainStream(learner_epoch=1)
    drain.add_credits(1)
    with pytest.raises(RefusedError):
        drain.add_credits(groups)
