"""Which hub a peer turns to that has relays."""

import grpc.aio
import pytest

from node.errors import Reason, RefusedError
from node.rpc.channel import ConnectionLost
from node.rpc.hub import RETURN_S, Hub, HubChannel


@pytest.fixture
def hub() -> Hub:
    return Hub("c:1,d:1", relays=("r:1", "s:1"))


def test_relays_come_before_coordinators_and_may_be_all_there_is(hub: Hub) -> None:
    assert hub.addresses == ("r:1", "s:1", "c:1", "d:1")
    assert Hub("", relays=("r:1",)).addresses == ("r:1",)
    with pytest.raises(ValueError, match="host:port"):
        Hub("")


@pytest.mark.parametrize(
    ("error", "moves"),
    [
        (ConnectionLost("cut"), True),
        (RefusedError(Reason.BUSY, "no connection to the coordinator"), True),
        (RefusedError(Reason.DRAINING, "stops"), True),
        (RefusedError(Reason.WRONG_PORT, "an older relay"), True),
        (RefusedError(Reason.NOT_JOINED, "it restarted"), False),
        (RefusedError(Reason.NAME_IN_USE, "a twin"), False),
    ],
)
def test_a_relay_is_left_unless_it_takes_the_peer_once_it_joins_again(
    hub: Hub, error: RefusedError | ConnectionLost, *, moves: bool
) -> None:
    hub.move_on_after(error)
    assert hub.address == ("s:1" if moves else "r:1")


def test_a_relay_that_refuses_for_good_is_believed_once_all_others_do(hub: Hub) -> None:
    assert hub.has_another_word()
    assert hub.has_another_word()
    assert hub.address == "c:1"
    assert not hub.has_another_word()  # a coordinator's word
    alone = Hub("", relays=("r:1", "s:1"))
    assert alone.has_another_word()
    assert not alone.has_another_word()
    alone.answered(0.0)
    assert alone.has_another_word()


def test_the_first_relay_is_tried_again_after_a_while_elsewhere(hub: Hub) -> None:
    assert not hub.answered(0.0)
    hub.move_on_after(ConnectionLost("cut"))
    assert not hub.answered(10.0)
    assert not hub.answered(9.0 + RETURN_S)
    assert hub.answered(10.0 + RETURN_S)
    assert hub.address == "r:1"
    without = Hub("c:1,d:1")
    without.move_on_after(ConnectionLost("cut"))
    assert not without.answered(0.0)
    assert not without.answered(2 * RETURN_S)
    assert without.address == "d:1"


def test_one_relay_that_refuses_for_good_again_and_again_stops_nobody_whose_other_hubs_are_away() -> None:
    hub = Hub("c:1", relays=("r:1",))
    for _ in range(5):
        assert hub.has_another_word()
        assert hub.address == "c:1"
        hub.move_on_after(ConnectionLost("away"))
    assert hub.has_another_word()
    assert not hub.has_another_word()  # the coordinator's word


async def test_calls_go_to_the_first_relay_once_it_is_tried_again() -> None:
    hub, dialled = Hub("c:1", relays=("r:1",)), []

    def dial(address: str) -> grpc.aio.Channel:
        dialled.append(address)
        return grpc.aio.insecure_channel(address)

    async with HubChannel(hub, dial) as channel:
        hub.move_on_after(ConnectionLost("cut"))
        channel.get_state()
        hub.answered(0.0)
        assert hub.answered(RETURN_S)
        channel.get_state()
    assert dialled == ["r:1", "c:1", "r:1"]
