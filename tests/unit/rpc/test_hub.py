"""Several coordinators as a peer knows them."""

import grpc.aio
import pytest

from node.errors import Reason, RefusedError
from node.rpc.call_ends import ConnectionLost
from node.rpc.hub import Hub, HubChannel


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


@pytest.mark.parametrize("reason", [Reason.BUSY, Reason.NOT_JOINED, Reason.EXPIRED])
def test_a_hub_stays_with_a_coordinator_that_refuses_as_the_leader_does(reason: Reason) -> None:
    hub = Hub("a:1,b:2")
    hub.move_on_after(RefusedError(reason, "no"))
    assert hub.address == "a:1"


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
