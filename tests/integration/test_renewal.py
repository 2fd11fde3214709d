"""Certificates that are made anew, and a coordinator that moves, while streams and groups are under way."""

import asyncio
import shutil
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest

from heterorl.v1 import common_pb2, rollout_pb2
from node.clients.membership.heartbeats import Notices, PeerReports
from node.clients.membership.join_call import RENEWAL_RETRY_S, Member
from node.clients.membership.membership_client import MembershipClient, Uplink
from node.enrolment import authority
from node.enrolment.move_notice import MovedCoordinator
from node.identity.certificates import key_to_pem, new_key
from node.identity.identity_store import (
    CERTIFICATE_FILE,
    Identity,
    load_identity,
    make_identity,
    save_identity,
)
from node.identity.own_identity import OwnIdentity
from node.identity.peer import Peer, server_name
from node.rpc.channel import Purpose, dial
from node.rpc.hub import Hub
from node.system.backoff import Backoff
from node.values.roles import Role
from support.by_rpc import say
from support.clock import ManualClock
from support.hub import LAYOUT, TIMEOUT_S, TOKENIZER, HandPeer, members, running_hub
from support.identity import MadeRun, make_run
from support.refusals import cannot_start
from support.relay import running_relay
from support.waiting import until

DAY_S = 86400.0
DUE_S = 250 * DAY_S
"""Later than two thirds of a year."""


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return make_run(tmp_path / "run", now=time.time())


@dataclass(slots=True)
class RunningMember:
    """A sampler's membership, and calls by its identity over a channel of their own."""

    own: OwnIdentity
    moved: MovedCoordinator
    clock: ManualClock
    peer: HandPeer


@asynccontextmanager
async def member(
    made: MadeRun, address: str, state: Path, identity: Identity | None = None
) -> AsyncIterator[RunningMember]:
    identity = identity or made.sampler
    save_identity(identity, state / "identity")
    own, clock = OwnIdentity(identity, state / "identity"), ManualClock(time.time())
    hub = Hub(address)
    moved = MovedCoordinator(hub, made.run, state)
    stopping = asyncio.Event()
    async with (
        dial(hub, own, purpose=Purpose.CONTROL, now=clock.now()) as control,
        dial(hub, own, purpose=Purpose.ROLLOUTS, now=clock.now()) as rollouts,
    ):
        client = MembershipClient(
            control,
            Member(made.run_id, Role.SAMPLER, layout_digest=LAYOUT, tokenizer_digest=TOKENIZER),
            Uplink(clock, Backoff(lambda: 0.5, first_s=0.02, cap_s=0.1), identity=own, hub=hub),
            reports=PeerReports(held=lambda: None, waits_for=str),
            notices=Notices(moved=moved.learn),
        )
        running = asyncio.create_task(client.run(ready=lambda: None, stopping=stopping))
        await asyncio.wait_for(client.settings(), TIMEOUT_S)
        yield RunningMember(own, moved, clock, HandPeer(identity, rollouts))
        stopping.set()
        await running


async def test_a_member_fetches_its_next_certificate_by_itself_and_no_stream_ends(
    made: MadeRun, tmp_path: Path
) -> None:
    async with (
        running_hub(made) as hub,
        members(hub) as (learner, _),
        member(made, hub.address, tmp_path) as it,
    ):
        await learner.drain()
        await hub.has_heard_learner()
        submitting = it.peer.rollout.SubmitRollouts(timeout=TIMEOUT_S)
        await submitting.write(rollout_pb2.SubmitRolloutsRequest())
        assert isinstance(await submitting.read(), rollout_pb2.SubmitRolloutsResponse)
        for clock in (hub.clock, it.clock):
            clock.advance(DUE_S)
        await until(lambda: it.own.renewals == 1)
        kept = load_identity(tmp_path / "identity")
        assert kept == it.own.current
        assert kept.not_after_s == pytest.approx(made.sampler.not_after_s + DUE_S, abs=600)
        # The certificate that the stream began with expires; it goes on.
        for clock in (hub.clock, it.clock):
            clock.advance(120 * DAY_S)
        hub.hub.servers[0]._interceptor.live.recheck()
        await submitting.write(rollout_pb2.SubmitRolloutsRequest())
        assert isinstance(await submitting.read(), rollout_pb2.SubmitRolloutsResponse)
        submitting.cancel()
        assert hub.metric("heterorl_node_refusals_total", service="RolloutService", reason="expired") == 0


async def test_new_connections_are_by_the_new_certificate_and_the_old_one_is_refused(
    made: MadeRun, tmp_path: Path
) -> None:
    late = late_in_its_time(made, "late", left_s=6.0)
    async with running_hub(made) as hub, members(hub) as (learner, _):
        await learner.drain()
        await hub.has_heard_learner()
        async with member(made, hub.address, tmp_path, late) as it:
            await until(lambda: it.own.renewals == 1)
            await until(lambda: time.time() > late.not_after_s)
            assert (await it.peer.lease()).leases
            with cannot_start(late.node_id):
                dial(hub.address, late, purpose=Purpose.ROLLOUTS, now=time.time())
            async with dial(hub.address, late, purpose=Purpose.ROLLOUTS, now=late.not_before_s) as channel:
                with pytest.raises(grpc.aio.AioRpcError, match="Socket closed"):
                    await HandPeer(late, channel).lease()


async def test_without_the_authoritys_key_nothing_is_renewed_until_it_is_brought_back(
    made: MadeRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, away = made.directory / "coordinator" / "authority" / "ca.key", tmp_path / "ca.key"
    shutil.move(key, away)
    async with running_hub(made) as hub, member(made, hub.address, tmp_path) as it:
        for clock in (hub.clock, it.clock):
            clock.advance(DUE_S)
        await until(lambda: "certificate not renewed: the authority's key is not here" in caplog.messages)
        assert it.own.renewals == 0
        # Not readable by its owner alone: the member stays all the same.
        key.write_bytes(b"half of it")
        it.clock.advance(RENEWAL_RETRY_S)
        await until(lambda: "certificate not renewed" in caplog.messages)
        shutil.move(away, key)
        for clock in (hub.clock, it.clock):
            clock.advance(RENEWAL_RETRY_S)
        await until(lambda: it.own.renewals == 1)


def late_in_its_time(made: MadeRun, node_id: str, *, left_s: float) -> Identity:
    """Return a sampler whose certificate ends in so many real seconds."""
    peer, key = Peer(made.run_id, Role.SAMPLER, node_id), new_key()
    certificate = made.authority.issue(
        peer, key.public_key(), now=time.time() - DUE_S, lifetime_s=DUE_S + left_s
    )
    return make_identity(key_to_pem(key), certificate, made.authority.certificate_pem)


async def test_a_relay_of_before_gets_a_certificate_with_a_relays_name_when_it_joins(
    made: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(authority, "server_name", lambda run_id, _: server_name(run_id, Role.COORDINATOR))
        older = made.issue(Role.RELAY, "relay-1", issued_at_s=time.time() - DAY_S)
    async with (
        running_hub(made) as hub,
        running_relay(made, tmp_path / "relay", coordinator=hub.address, identity=older) as relay,
    ):
        await until(lambda: relay.identity.renewals == 1)
        (bulk,) = relay.source().bulk
        await asyncio.wait_for(bulk.channel_ready(), TIMEOUT_S)
    kept = (tmp_path / "relay" / CERTIFICATE_FILE).read_bytes()
    assert kept == relay.identity.current.certificate_pem


async def test_a_coordinator_moves_with_leases_under_way_and_nothing_is_lost(
    made: MadeRun, tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        new_address = f"127.0.0.1:{probe.getsockname()[1]}"
    async with AsyncExitStack() as stack:
        async with running_hub(made) as hub, members(hub) as (learner, _):
            it = await stack.enter_async_context(member(made, hub.address, tmp_path))
            await learner.drain()
            await hub.has_heard_learner()
            (lease,) = (await it.peer.lease()).leases
            await say(made, "move", "--to", new_address)
            await until((tmp_path / "moved").exists)
            assert it.moved.hub.address == hub.address
        async with running_hub(made, listen=new_address) as hub, members(hub) as (learner, _):
            await until(lambda: it.moved.hub.address == new_address)
            drain = await learner.drain(credits=1)
            await until(lambda: it.own.current.peer in hub.hub.peers)
            assert (await it.peer.submit(lease)).verdict == common_pb2.VERDICT_SPOOLED
            assert await drain.group() == lease.lease_id
            await stack.aclose()
