"""Two whole coordinators on one real database: one serves, the other stands by and takes over."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psycopg
import pytest

from deploy.runs.run_directory import free_ports
from heterorl.v1 import common_pb2
from node.clients.membership.heartbeats import Notices, PeerReports
from node.clients.membership.join_call import Member
from node.clients.membership.membership_client import MembershipClient, Uplink
from node.coordinator.config import CoordinatorConfig
from node.coordinator.coordinator_role import build
from node.coordinator.lifecycle import takeover as candidate
from node.coordinator.lifecycle.takeover import Candidate
from node.enrolment.enrolment_ledger import FILE_NAME as ENROLMENT_FILE
from node.enrolment.enrolment_ledger import known_members
from node.errors import DeposedError, Reason
from node.exit_code import ExitCode, exit_code_of_failure
from node.process.daemon import Phase
from node.rpc.call_ends import REASON_KEY
from node.rpc.channel import Purpose, dial
from node.rpc.hub import Hub
from node.system.backoff import Backoff
from node.system.clock import SystemClock
from node.values.operator_order import REVOKE, Order
from node.values.roles import Role
from node.weights.transfer.sources import dial_source
from support.groups import SAMPLING
from support.hub import LAYOUT, TOKENIZER, HandPeer
from support.identity import MadeRun
from support.orders import give
from support.policy_hub import Registry, make_sources
from support.refusals import refused
from support.roles import role_context
from support.waiting import until

pytestmark = pytest.mark.needs("postgresql")


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate, "LOOK_S", 0.02)


@dataclass(slots=True)
class Running:
    """A coordinator, whatever it is doing."""

    address: str
    state_dir: Path
    phases: list[Phase]
    ready: asyncio.Event
    stopping: asyncio.Event
    task: "asyncio.Task[None]"

    async def stands_by(self) -> None:
        await until(lambda: Phase.STANDBY in self.phases)

    async def leads(self) -> None:
        async with asyncio.timeout(20):
            await self.ready.wait()


@asynccontextmanager
async def coordinator(made: MadeRun, state_dir: Path, database: str) -> AsyncIterator[Running]:
    """Run a coordinator with a disk of its own and the identity that they share."""
    shutil.copytree(made.directory / "coordinator", state_dir, dirs_exist_ok=True)
    (port,) = free_ports(1)
    section = CoordinatorConfig.model_validate(
        {
            "task": "addition",
            "prompts": 100,
            "group_size": 2,
            "batch_groups": 2,
            "max_new_tokens": SAMPLING.max_new_tokens,
            "listen": f"127.0.0.1:{port}",
            "enrolment_listen": "127.0.0.1:0",
            "ledger": database,
        }
    )
    phases: list[Phase] = []
    context = role_context(made, Role.COORDINATOR, section, drain_timeout_s=2.0)
    (service,) = await build(replace(context, state_dir=state_dir, announce=phases.append))
    assert isinstance(service, Candidate)
    ready, stopping = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(service.run(ready=ready.set, stopping=stopping))
    try:
        yield Running(section.listen, state_dir, phases, ready, stopping, task)
    finally:
        stopping.set()
        await asyncio.wait({task})


@asynccontextmanager
async def peer(made: MadeRun, role: Role, at: Running) -> AsyncIterator[HandPeer]:
    async with dial(at.address, made.of(role), purpose=Purpose.ROLLOUTS, now=time.time()) as channel:
        yield HandPeer(made.of(role), channel)


@pytest.fixture
async def both(made: MadeRun, tmp_path: Path, database: str) -> AsyncIterator[tuple[Running, Running]]:
    """Run a coordinator that leads and another that stands by."""
    async with coordinator(made, tmp_path / "one", database) as one:
        await one.leads()
        async with coordinator(made, tmp_path / "other", database) as other:
            await other.stands_by()
            yield one, other


async def refusal(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    trailing = dict(error.value.trailing_metadata() or ())
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    return str(trailing.get(REASON_KEY)), error.value.details() or ""


async def test_who_stands_by_refuses_every_call_and_says_who_leads(
    made: MadeRun, both: tuple[Running, Running]
) -> None:
    one, other = both
    assert not other.ready.is_set()
    for each in both:
        assert known_members(each.state_dir / ENROLMENT_FILE) is None  # the database has them
    async with peer(made, Role.SAMPLER, other) as sampler:
        reason, detail = await refusal(sampler.join())
        assert reason == Reason.STANDBY
        assert "this coordinator stands by" in detail
        assert (await refusal(sampler.lease()))[0] == Reason.STANDBY
        while one.address not in detail:
            _, detail = await refusal(sampler.join())
    assert one.phases == []
    assert not one.task.done()


async def test_groups_of_the_leader_that_stopped_are_delivered_by_the_next(
    made: MadeRun, both: tuple[Running, Running]
) -> None:
    one, other = both
    async with (
        peer(made, Role.LEARNER, one) as learner,
        peer(made, Role.SAMPLER, one) as sampler,
        peer(made, Role.LEARNER, other) as learner_again,
        peer(made, Role.SAMPLER, other) as sampler_again,
    ):
        await learner.join()
        drain = await learner.drain(credits=1)
        await sampler.join()
        delivered, kept = (await sampler.lease(2)).leases
        for lease in (delivered, kept):
            assert (await sampler.submit(lease)).verdict == common_pb2.VERDICT_SPOOLED
        first = await drain.group()
        one.stopping.set()
        await other.leads()
        await asyncio.wait({one.task})
        await learner_again.join(held=common_pb2.PolicyVersion(number=0))
        groups = await learner_again.groups(2)
        assert {group.group_id for group in groups} == {delivered.lease_id, kept.lease_id}
        assert first in {group.group_id for group in groups}
        await sampler_again.join()
        assert (await sampler_again.submit(kept)).verdict == common_pb2.VERDICT_DUPLICATE
        (fresh,) = (await sampler_again.lease()).leases
        assert fresh.lease_id not in (delivered.lease_id, kept.lease_id)


async def test_a_leader_whose_session_is_ended_serves_nobody_any_more_and_ends_with_its_exit_code(
    made: MadeRun, tmp_path: Path, database: str
) -> None:
    async with coordinator(made, tmp_path / "one", database) as one:
        await one.leads()
        async with peer(made, Role.SAMPLER, one) as sampler:
            await sampler.join()
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute("UPDATE leadership SET epoch = epoch + 1")
        with pytest.raises(DeposedError, match="another coordinator leads, with epoch 2") as error:
            await one.task
    assert exit_code_of_failure(error.value, was_serving=True) is ExitCode.DEPOSED


async def test_a_peer_that_knows_both_finds_who_leads_before_and_after_a_takeover(
    made: MadeRun, both: tuple[Running, Running]
) -> None:
    one, other = both
    hub = Hub(f"{other.address},{one.address}")
    channel = dial(hub, made.sampler, purpose=Purpose.CONTROL, now=time.time())
    joins: list[str] = []
    client = MembershipClient(
        channel,
        Member(made.run_id, Role.SAMPLER, layout_digest=LAYOUT, tokenizer_digest=TOKENIZER),
        Uplink(SystemClock(), Backoff(lambda: 0.1), hub=hub),
        reports=PeerReports(held=lambda: None, waits_for=str),
        notices=Notices(),
    )
    stopping = asyncio.Event()
    member = asyncio.create_task(client.run(ready=lambda: joins.append(hub.address), stopping=stopping))
    await until(lambda: bool(joins))
    assert joins == [one.address]
    one.stopping.set()
    await other.leads()
    await until(lambda: hub.address == other.address)
    await client.heartbeats.next_answer()
    stopping.set()
    await member
    await channel.close()


async def test_coordinators_of_one_hub_are_one_source_of_versions(made: MadeRun) -> None:
    hub = Hub("127.0.0.1:1,127.0.0.1:2")
    source = dial_source(hub, made.sampler, connections=1, now=time.time())
    assert len(make_sources(Registry(), source)) == 1
    assert source.address == str(hub)


async def test_who_was_revoked_under_the_leader_before_stays_out(
    made: MadeRun, both: tuple[Running, Running]
) -> None:
    one, other = both
    revoked = Order(REVOKE, "sampler-1", order_id="1")
    with refused(Reason.STANDBY, one.address):
        await give(other.state_dir, revoked)
    await give(one.state_dir, revoked)
    one.stopping.set()
    await other.leads()
    async with peer(made, Role.SAMPLER, other) as sampler:
        with pytest.raises(grpc.aio.AioRpcError, match="sampler-1 was revoked"):
            await sampler.join()
