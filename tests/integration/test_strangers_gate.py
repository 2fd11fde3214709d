"""The port for strangers under those who hold it: others are let in, and members lose nothing."""

import asyncio
import logging
import tempfile
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from node.errors import Reason
from node.rpc.address import split_address
from node.rpc.call_ends import call
from node.rpc.calls.server import Audience
from node.rpc.channel import dial_as_stranger
from node.rpc.strangers import private_socket
from node.rpc.strangers.places import PlaceLimits
from node.rpc.strangers.strangers_gate import GateLimits, limits_for
from support.identity import MadeRun
from support.rpc import Serving, every_service, invoke, rpcs, serving
from support.strangers import half_open_calls, hold_idle_connections
from support.waiting import until

ENROL = "/heterorl.v1.EnrolmentService/Enrol"
FEW = PlaceLimits(connections=6, per_address=4, kept_s=0.0)


def a_gate(made: MadeRun, places: PlaceLimits = FEW, **limits: Any) -> Any:
    gate = GateLimits(places, **limits)
    return serving(made, every_service, audience=Audience.STRANGERS, gate=gate, first_message_s=0.2)


def stranger(made: MadeRun, hub: Serving) -> grpc.aio.Channel:
    return dial_as_stranger(hub.address, run_id=made.run_id, ca_pem=made.coordinator.ca_pem)


@pytest.mark.parametrize("tls", [True, False])
async def test_one_address_holds_its_share_and_no_more_and_a_newcomer_gets_in(
    made: MadeRun, tls: bool
) -> None:
    async with a_gate(made) as hub:
        async with hold_idle_connections(hub.address, 50, tls=tls) as held:
            await until(lambda: held.open <= FEW.per_address)
            async with stranger(made, hub) as channel:
                assert await invoke(channel, ENROL) == [b""]
        assert hub.refusals["EnrolmentService", Reason.BUSY] >= 46


@pytest.mark.parametrize("limits", [{"idle_s": 0.2}, {"age_s": 0.2}])
async def test_idle_and_old_connections_are_closed(made: MadeRun, limits: dict[str, Any]) -> None:
    async with a_gate(made, **limits) as hub, hold_idle_connections(hub.address, 3) as held:
        assert held.open == 3
        await until(lambda: held.open == 0)
        assert hub.refusals == {("EnrolmentService", Reason.BUSY): 3}


async def test_a_connection_that_sends_too_much_is_read_no_further(made: MadeRun) -> None:
    async with a_gate(made, received_bytes=10_000, idle_s=0.2) as hub:
        host, port = split_address(hub.address)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"\x16\x03\x01\x3f\xff" + bytes(1 << 20))
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1 << 20)
        writer.close()


@pytest.mark.parametrize(
    ("place", "listen"),
    [
        *((place, "127.0.0.1:0") for place in ("short", "long", "missing", "a file", "nowhere")),
        ("long", "[::1]:0"),
    ],
)
async def test_strangers_are_served_whatever_the_directory_for_temporary_files_is(
    made: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, listen: str
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as short:
        directory = Path(short) if place == "short" else tmp_path / ("x" * 80)
        if place == "long":
            directory.mkdir()
        elif place == "a file":
            directory.touch()
        elif place == "nowhere":
            monkeypatch.setattr(private_socket, "_parents", lambda: iter([str(directory)]))
        monkeypatch.setenv("TMPDIR", str(directory))
        async with (
            serving(made, every_service, audience=Audience.STRANGERS, listen=listen) as hub,
            stranger(made, hub) as channel,
        ):
            assert await invoke(channel, ENROL) == [b""]


async def test_a_server_behind_the_gate_that_is_not_reached_is_said(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(private_socket.PrivateSocket, "path", "/nowhere")
    async with a_gate(made) as hub, stranger(made, hub) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await invoke(channel, ENROL)
        assert hub.refusals["EnrolmentService", Reason.INTERNAL]
    [told, *_] = [vars(one) for one in caplog.records if one.message == "connection refused"]
    assert "No such file" in told["detail"]


async def test_half_open_calls_of_strangers_end(made: MadeRun) -> None:
    async with a_gate(made) as hub, stranger(made, hub) as channel:
        ended = await half_open_calls(channel, ENROL, 4)
        assert ended == {"busy": 4}


async def test_a_servicer_sees_the_callers_address(made: MadeRun, caplog: pytest.LogCaptureFixture) -> None:
    peers: list[str] = []

    async def enrol(request: Any, context: Any) -> Any:
        peers.append(context.peer())
        raise AssertionError

    caplog.set_level(logging.CRITICAL)
    async with (
        serving(made, rpcs({ENROL: enrol}), audience=Audience.STRANGERS) as hub,
        stranger(made, hub) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError):
            await invoke(channel, ENROL)
    assert Path(peers[0]).name.startswith("127.0.0.1:")


async def test_a_burst_of_honest_newcomers_is_let_in(made: MadeRun) -> None:
    async def enrol(hub: Serving) -> None:
        async with stranger(made, hub) as channel:
            method: Any = channel.unary_unary(ENROL)
            await call(method, b"", timeout_s=10)

    places = limits_for(1024).places
    async with a_gate(made, places) as hub:
        await asyncio.gather(*(enrol(hub) for _ in range(places.per_address)))
        assert hub.refusals == {}


@pytest.mark.parametrize(
    ("descriptors", "connections"), [(256, 16), (1024, 32), (4096, 128), (65_536, 256), (1 << 20, 256)]
)
def test_strangers_have_a_tenth_of_all_descriptors_at_most_where_there_are_few(
    descriptors: int, connections: int
) -> None:
    limits = limits_for(descriptors)
    assert limits.places.connections == connections
    assert limits.places.per_address < connections
    if descriptors >= 1024:
        assert 3 * connections <= descriptors / 10
