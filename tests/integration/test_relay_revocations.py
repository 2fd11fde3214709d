"""Who the coordinator shuts out is shut out at relays too, by what rides on their heartbeats."""

import asyncio
import time
from pathlib import Path

import pytest

from heterorl.v1 import policy_pb2, policy_pb2_grpc
from node.errors import Reason, RefusedError
from node.identity.identity_store import Identity
from node.identity.revocation import COPY_NAME
from node.rpc.call_ends import call
from node.rpc.channel import Purpose, dial
from node.values.roles import Role
from support.by_rpc import say
from support.enrolled import let_in
from support.hub import running_hub
from support.identity import MadeRun
from support.relay import running_relay


async def answer_to(identity: Identity, address: str) -> Reason:
    """Say why a relay that has nothing refuses a manifest."""
    async with dial(
        address, identity, purpose=Purpose.CONTROL, now=time.time(), server=Role.RELAY
    ) as channel:
        stub: policy_pb2_grpc.PolicyServiceAsyncStub = policy_pb2_grpc.PolicyServiceStub(channel)
        request = policy_pb2.GetManifestRequest(key=policy_pb2.ArtifactKey(version=1, base_version=-1))
        with pytest.raises(RefusedError) as refused:
            await call(stub.GetManifest, request, timeout_s=10.0)
    return refused.value.reason


async def becomes(identity: Identity, address: str, reason: Reason) -> None:
    async with asyncio.timeout(20):
        while await answer_to(identity, address) is not reason:
            pass  # each look is a round trip


async def test_a_node_the_coordinator_shuts_out_is_refused_by_its_relays_until_it_is_let_in_again(
    made: MadeRun, tmp_path: Path
) -> None:
    async with (
        running_hub(made) as hub,
        running_relay(made, tmp_path / "relay", coordinator=hub.address) as relay,
    ):
        await becomes(made.sampler, relay.address, Reason.UNKNOWN_VERSION)
        let_in(made.directory, made.sampler.node_id)
        await say(made, "revoke", made.sampler.node_id, "--because", "its disk was sold")
        await becomes(made.sampler, relay.address, Reason.REVOKED)
        assert await answer_to(made.other_sampler, relay.address) is Reason.UNKNOWN_VERSION
        await say(made, "revoke", "--undo", made.sampler.node_id)
        await becomes(made.sampler, relay.address, Reason.UNKNOWN_VERSION)


async def test_a_relay_that_starts_while_the_coordinator_is_away_knows_whom_it_shut_out(
    made: MadeRun, tmp_path: Path
) -> None:
    let_in(made.directory, made.sampler.node_id)
    await say(made, "revoke", made.sampler.node_id)
    async with (
        running_hub(made) as hub,
        running_relay(made, tmp_path / "relay", coordinator=hub.address) as relay,
    ):
        await becomes(made.sampler, relay.address, Reason.REVOKED)
        address = hub.address
    assert (tmp_path / "relay" / COPY_NAME).read_text() == f"{made.sampler.node_id}\n"
    async with running_relay(made, tmp_path / "relay", coordinator=address) as relay:
        assert await answer_to(made.sampler, relay.address) is Reason.REVOKED
