"""Several coordinators as a peer knows them."""

import pytest

from node.errors import Reason, RefusedError
from node.rpc.channel import ConnectionLost
from node.rpc.hub import Hub


def test_a_hub_goes_round_its_addresses() -> None:
    hub = Hub("a:1, b:2,a:1")
    assert (hub.addresses, hub.address, str(hub)) == (("a:1", "b:2"), "a:1", "a:1,b:2")
    seen = []
    for error in (
        ConnectionLost("gone"),
        RefusedError(Reason.STANDBY, "another leads"),
        RefusedError(Reason.DRAINING, "stopping"),
    ):
        hub.move_on_after(error)
        seen.append(hub.address)
    assert (seen, hub.moves) == (["b:2", "a:1", "b:2"], 3)


@pytest.mark.parametrize("reason", [Reason.BUSY, Reason.TASK_UNDECIDED, Reason.NOT_JOINED, Reason.EXPIRED])
def test_a_hub_stays_with_a_coordinator_that_refuses_as_the_leader_does(reason: Reason) -> None:
    hub = Hub("a:1,b:2")
    hub.move_on_after(RefusedError(reason, "no"))
    assert hub.address == "a:1"


@pytest.mark.parametrize("text", ["", "a:1,", "a:1,b", "a:1,b:0"])
def test_what_cannot_be_dialled_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not host:port|cannot be dialled"):
        Hub(text)
