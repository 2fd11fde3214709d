"""Several coordinators as a peer knows them, and the relays by which it reaches them."""

import grpc.aio
import pytest

from node.errors import Reason, RefusedError
from node.rpc.call_ends import ConnectionLost
from node.rpc.hub import Hub, HubChannel


def test_a_hub_goes_round_its_addresses() -> None:
    hub = Hub("a:1, b:2,a:1")
    assert (hub.addresses, hub.address, str(hub)) == (("a:1", "b:2"), "a:1", "a:1,b:2")
    seen = []
    for _ in range(3):
        hub.move_on_after(ConnectionLost("gone"))
        seen.append(hub.address)
    assert (seen, hub.moves) == (["b:2", "a:1", "b:2"], 3)


@pytest.mark.parametrize("text", ["", "a:1,", "a:1,b", "a:1,b:0"])
def test_what_cannot_be_dialled_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not host:port|cannot be dialled"):
        Hub(text)


async def test_a_hub_without_another_address_keeps_its_connection_after_a_call_that_was_too_slow() -> None:
    hub, dialled = Hub("far.example.net:7700"), []

    def dial(address: str) -> grpc.aio.Channel:
        dialled.append(address)
        return grpc.aio.insecure_channel(address)

    async with HubChannel(hub, dial) as channel:
        hub.move_on_after(ConnectionLost("DEADLINE_EXCEEDED"))
        channel.get_state()
    assert dialled == [hub.address]


async def test_calls_begin_anew_by_the_callers_next_certificate() -> None:
    hub, dialled, renewals = Hub("c:1"), [], 0

    def dial(address: str) -> grpc.aio.Channel:
        dialled.append(renewals)
        return grpc.aio.insecure_channel(address)

    async with HubChannel(hub, dial, renewals=lambda: renewals) as channel:
        channel.get_state()
        renewals = 1
        channel.get_state()
        channel.get_state()
    assert dialled == [0, 1]


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
        (RefusedError(Reason.STANDBY, "another coordinator leads"), True),
        (RefusedError(Reason.DRAINING, "stops"), True),
        (RefusedError(Reason.BUSY, "the leader's word"), False),
        (RefusedError(Reason.NOT_JOINED, "it restarted"), False),
        (RefusedError(Reason.EXPIRED, "as the leader says"), False),
    ],
)
def test_a_relay_is_left_where_no_coordinator_that_leads_is_behind_it(
    hub: Hub, error: RefusedError | ConnectionLost, *, moves: bool
) -> None:
    told: list[str] = []
    hub.watch(lambda: told.append(hub.address))
    hub.move_on_after(error)
    assert hub.address == ("s:1" if moves else "r:1")
    assert told == (["s:1"] if moves else [])


def test_addresses_that_are_learnt_come_behind_the_relays(hub: Hub) -> None:
    hub.learn(("n:1",))
    assert hub.addresses == ("r:1", "s:1", "n:1", "c:1", "d:1")


async def test_calls_go_round_all_addresses() -> None:
    hub, dialled = Hub("c:1", relays=("r:1",)), []

    def dial(address: str) -> grpc.aio.Channel:
        dialled.append(address)
        return grpc.aio.insecure_channel(address)

    async with HubChannel(hub, dial) as channel:
        for _ in range(2):
            hub.move_on_after(ConnectionLost("cut"))
            channel.get_state()
    assert dialled == ["r:1", "c:1", "r:1"]
