"""A connection that nobody uses stays, and its pings are not taken for an attack; one to nobody ends."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from heterorl.v1 import policy_pb2, policy_pb2_grpc
from node.rpc.channel import KEEPALIVE, Keepalive, Purpose, dial
from support.coordinator_process import coordinator
from support.identity import MadeRun
from support.rpc import every_service, invoke, serving

READY = grpc.ChannelConnectivity.READY
MANIFEST = "/heterorl.v1.PolicyService/GetManifest"
CLIENT = Keepalive(ping_after_s=0.5)
PATIENT = Keepalive(ping_after_s=60.0, allowed_every_s=0.25)
"""Stands to the client as our server does to our clients, 40 times as fast; it does not ping itself."""
SUSPICIOUS = Keepalive(ping_after_s=60.0, allowed_every_s=300.0)
"""A server that was never told of our pings: it cuts a connection at the third that it does not allow."""


@asynccontextmanager
async def idle_connection(made: MadeRun, server: Keepalive) -> AsyncIterator[grpc.aio.Channel]:
    async with (
        serving(made, every_service, keepalive=server) as hub,
        dial(hub.address, made.sampler, purpose=Purpose.BULK, now=time.time(), keepalive=CLIENT) as channel,
    ):
        await invoke(channel, MANIFEST)
        assert channel.get_state() is READY
        yield channel


async def test_an_idle_connection_that_pings_is_cut_only_by_a_server_that_does_not_allow_it(
    made: MadeRun,
) -> None:
    async with idle_connection(made, PATIENT) as allowed, idle_connection(made, SUSPICIOUS) as forbidden:
        # The second, which has sent fewer pings, shows that there are pings at all.
        async with asyncio.timeout(30):
            await forbidden.wait_for_state_change(READY)
        assert allowed.get_state() is READY


async def test_a_hub_that_stands_still_is_a_lost_connection_as_one_that_is_gone(
    made: MadeRun, tmp_path: Path
) -> None:
    impatient = Keepalive(ping_after_s=1.0, give_up_after_s=1.0)
    async with coordinator(made, tmp_path / "log") as hub:
        address = (await hub.event("serving"))["address"]
        async with dial(
            address, made.sampler, purpose=Purpose.CONTROL, now=time.time(), keepalive=impatient
        ) as channel:
            stub: policy_pb2_grpc.PolicyServiceAsyncStub = policy_pb2_grpc.PolicyServiceStub(channel)
            watching = stub.WatchVersions(policy_pb2.WatchVersionsRequest())
            await channel.channel_ready()
            hub.process.send_signal(signal.SIGSTOP)
            async with asyncio.timeout(20):  # gRPC's own limit is a minute
                with pytest.raises(grpc.aio.AioRpcError, match="ping timeout"):
                    await watching.read()


def test_our_server_allows_the_pings_of_our_clients() -> None:
    assert KEEPALIVE.allowed_every_s <= KEEPALIVE.ping_after_s / 2
