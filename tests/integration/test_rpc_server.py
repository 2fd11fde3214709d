"""Where the server may listen, and how it stops."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from heterorl.v1 import policy_pb2, policy_pb2_grpc
from node.errors import Reason, RefusedError, StartupError
from node.rpc.call_ends import ConnectionLost, classified
from node.rpc.channel import Purpose, dial
from support.identity import MadeRun
from support.refusals import refused
from support.rpc import every_service, invoke, rpcs, serving

MANIFEST = "/heterorl.v1.PolicyService/GetManifest"
FETCH = "/heterorl.v1.PolicyService/FetchFrames"
WATCH = "/heterorl.v1.PolicyService/WatchVersions"


def sampler_channel(made: MadeRun, address: str) -> grpc.aio.Channel:
    return dial(address, made.sampler, purpose=Purpose.BULK, now=time.time())


async def startup_error(made: MadeRun, **changes: Any) -> str:
    with pytest.RaisesGroup(pytest.RaisesExc(StartupError)) as raised:
        async with serving(made, every_service, **changes):
            pass
    return str(raised.value.exceptions[0])


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "hub.example.org:0"])
async def test_tls_cannot_be_off_where_other_machines_could_call(made: MadeRun, listen: str) -> None:
    assert "TLS is off" in await startup_error(made, listen=listen, tls=False)
    assert "'127.0.0.1' is not host:port" in await startup_error(made, listen="127.0.0.1")


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:0"])
async def test_tls_may_be_off_on_loopback(made: MadeRun, listen: str) -> None:
    async with (
        serving(made, every_service, listen=listen, tls=False) as hub,
        dial(hub.address, made.sampler.peer, purpose=Purpose.BULK, now=0) as channel,
    ):
        assert await invoke(channel, MANIFEST) == [b""]


async def test_with_tls_any_address_of_this_machine_may_be_listened_on(made: MadeRun) -> None:
    async with serving(made, every_service, listen="0.0.0.0:0") as hub:
        port = hub.address.rpartition(":")[2]
        async with sampler_channel(made, f"127.0.0.1:{port}") as channel:
            assert await invoke(channel, MANIFEST) == [b""]


async def test_draining_refuses_new_rpcs_cuts_endless_streams_and_lets_the_others_finish(
    made: MadeRun,
) -> None:
    may_finish = asyncio.Event()

    async def fetch(request: Any, context: Any) -> AsyncIterator[policy_pb2.FetchFramesResponse]:
        yield policy_pb2.FetchFramesResponse(data=b"first")
        await may_finish.wait()
        yield policy_pb2.FetchFramesResponse(data=b"last")

    async def watch(request: Any, context: Any) -> AsyncIterator[policy_pb2.WatchVersionsResponse]:
        yield policy_pb2.WatchVersionsResponse()
        await asyncio.Event().wait()

    servicers = (every_service, rpcs({FETCH: fetch, WATCH: watch}))
    async with (
        serving(made, *reversed(servicers), drain_grace_s=20) as hub,
        sampler_channel(made, hub.address) as channel,
    ):
        stub = policy_pb2_grpc.PolicyServiceStub(channel)
        fetching = stub.FetchFrames(policy_pb2.FetchFramesRequest(), timeout=20)
        watching = stub.WatchVersions(policy_pb2.WatchVersionsRequest(), timeout=20)
        await fetching.read()
        await watching.read()

        hub.stopping.set()
        with refused(Reason.DRAINING), classified():
            await watching.read()
        with refused(Reason.DRAINING), classified():
            await invoke(channel, MANIFEST)
        assert not hub.running.done()

        may_finish.set()
        last = await fetching.read()
        assert isinstance(last, policy_pb2.FetchFramesResponse)
        assert last.data == b"last"
        assert await fetching.read() is grpc.aio.EOF
        await asyncio.wait_for(asyncio.shield(hub.running), 10)


async def test_what_has_not_finished_when_the_grace_is_over_is_cut(
    made: MadeRun, caplog: pytest.LogCaptureFixture
) -> None:
    async def fetch(request: Any, context: Any) -> AsyncIterator[policy_pb2.FetchFramesResponse]:
        yield policy_pb2.FetchFramesResponse()
        await asyncio.Event().wait()

    async with (
        serving(made, rpcs({FETCH: fetch}), drain_grace_s=0.05) as hub,
        sampler_channel(made, hub.address) as channel,
    ):
        stub = policy_pb2_grpc.PolicyServiceStub(channel)
        fetching = stub.FetchFrames(policy_pb2.FetchFramesRequest(), timeout=20)
        await fetching.read()
        hub.stopping.set()
        with pytest.raises(RefusedError) as cut, classified():
            await fetching.read()
        assert cut.value.reason is Reason.DRAINING
        await asyncio.wait_for(asyncio.shield(hub.running), 10)
    [late] = [record for record in caplog.records if record.message == "rpcs late to drain"]
    assert late.__dict__["methods"] == [FETCH]


async def test_a_stopped_server_is_a_lost_connection_and_a_new_one_on_its_port_is_found(
    made: MadeRun,
) -> None:
    async with serving(made, every_service) as hub:
        address = hub.address
    async with sampler_channel(made, address) as channel:
        with pytest.raises(ConnectionLost), classified():
            await invoke(channel, MANIFEST)
        async with serving(made, every_service, listen=address):
            async with asyncio.timeout(20):
                await channel.channel_ready()
            assert await invoke(channel, MANIFEST) == [b""]


async def test_a_caller_that_never_begins_its_handshake_is_dropped(made: MadeRun) -> None:
    async with serving(made, every_service, handshake_s=0.2) as hub:
        host, _, port = hub.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()


async def test_every_channel_is_a_connection_of_its_own(made: MadeRun) -> None:
    connections: list[str] = []

    async def note(request: Any, context: Any) -> policy_pb2.GetManifestResponse:
        connections.append(context.peer())
        return policy_pb2.GetManifestResponse()

    # Without TLS: channels with credentials of their own never share.
    sampler = made.sampler.peer
    async with (
        serving(made, rpcs({MANIFEST: note}), tls=False) as hub,
        dial(hub.address, sampler, purpose=Purpose.BULK, now=0) as first,
        dial(hub.address, sampler, purpose=Purpose.BULK, now=0) as second,
    ):
        for channel in (first, second, first):
            await invoke(channel, MANIFEST)
    assert connections[0] != connections[1]
    assert connections[0] == connections[2]


async def test_a_caller_that_goes_while_it_is_answered_leaves_no_error_in_the_log(
    made: MadeRun, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("grpc._cython.cygrpc")
    async with serving(made, every_service):
        for error in (cygrpc.ExecuteBatchError("it has gone"), ValueError("our own fault")):
            log.error("raised by a servicer method", exc_info=error)
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["our own fault"]
