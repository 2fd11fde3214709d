"""An older ledger under the coordinator, an older copy of the learner beside the live one: real sockets."""

import asyncio
import shutil
import socket
import time
from collections.abc import Callable

import grpc.aio
from prometheus_client import CollectorRegistry

from heterorl.v1 import common_pb2, rollout_pb2
from node.clients.membership.heartbeats import Notices, PeerReports
from node.clients.membership.join_call import Member
from node.clients.membership.membership_client import MembershipClient, Uplink
from node.clients.rollouts.rollout_drain import RolloutDrain
from node.errors import Reason
from node.rpc.channel import Purpose, dial
from node.system.backoff import Backoff
from node.system.clock import SystemClock
from node.telemetry.metrics import NodeMetrics
from node.values.policy import PolicyVersion
from node.values.roles import Role
from node.values.run import StepRecord
from support.clock import ManualClock
from support.hub import LAYOUT, TOKENIZER, HandDrain, HandPeer, running_hub
from support.identity import MadeRun
from support.refusals import refused
from support.waiting import eventually, until

COPIED_AT, LAST = 3, 6


async def train(sampler: HandPeer, drain: HandDrain, *, first: int, last: int) -> dict[int, str]:
    """Train one group a version; return version -> group id."""
    trained = {}
    for version in range(first, last + 1):
        sampler.held = common_pb2.PolicyVersion(number=version - 1)
        lease = await first_lease(sampler)
        await sampler.submit(lease)
        await drain.step(version, lease.lease_id)
        assert await drain.acknowledgement() == version
        trained[version] = lease.lease_id
    return trained


async def first_lease(sampler: HandPeer) -> rollout_pb2.PromptLease:
    """Ask until there is one: none is granted before the coordinator has read the learner's hello."""
    leases: list[rollout_pb2.PromptLease] = []

    async def is_granted() -> bool:
        leases.extend((await sampler.lease()).leases)
        return bool(leases)

    await eventually(is_granted)
    return leases[0]


async def trained_run_with_a_copy(made: MadeRun) -> dict[int, str]:
    """Train to version LAST; put the ledger back as it was at COPIED_AT. Return version -> group id."""
    ledger = made.directory / "coordinator" / "ledger.sqlite"
    trained: dict[int, str] = {}
    for epoch, first, last in ((1, 1, COPIED_AT), (2, COPIED_AT + 1, LAST)):
        async with running_hub(made) as hub, hub.peer() as learner, hub.peer(made.sampler) as sampler:
            await join(learner, epoch=epoch, version=first - 1)
            await sampler.join()
            drain = await learner.drain(learner_epoch=epoch, version=first - 1)
            trained |= await train(sampler, drain, first=first, last=last)
        if last == COPIED_AT:
            shutil.copy(ledger, made.directory / "copy.sqlite")
    shutil.copy(ledger, made.directory / "newest.sqlite")
    shutil.copy(made.directory / "copy.sqlite", ledger)
    return trained


async def join(learner: HandPeer, *, epoch: int, version: int) -> None:
    await learner.join(learner_epoch=epoch, held=common_pb2.PolicyVersion(number=version))


async def test_a_learner_waits_by_name_for_the_newest_ledger_and_goes_on_when_it_is_back(
    made: MadeRun,
) -> None:
    trained = await trained_run_with_a_copy(made)
    node_metrics = NodeMetrics(CollectorRegistry(), roles=["learner"], clock=ManualClock(0.0))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{probe.getsockname()[1]}"
    channel = dial(listen, made.learner, purpose=Purpose.ROLLOUTS, now=time.time())
    drain = RolloutDrain(
        channel,
        lambda _: None,
        learner_epoch=3,
        version=LAST,
        capacity_groups=4,
        unacknowledged=[StepRecord(LAST, (trained[LAST],), (1,))],
        backoff=Backoff(lambda: 0.5, cap_s=0.2),
        count_lost_stream=lambda: None,
        waiting=node_metrics.waiting,
    )
    stopping = asyncio.Event()
    running = asyncio.create_task(drain.run(ready=lambda: None, stopping=stopping))
    try:
        async with running_hub(made, listen=listen) as hub, hub.peer() as learner:
            await join(learner, epoch=3, version=LAST)
            await until(lambda: node_metrics.waits_for == "newest ledger")
            assert (
                hub.metric("heterorl_node_refusals_total", service="RolloutService", reason="ledger_behind")
                > 0
            )
        shutil.copy(made.directory / "newest.sqlite", made.directory / "coordinator" / "ledger.sqlite")
        async with running_hub(made, listen=listen) as hub, hub.peer() as learner:
            await join(learner, epoch=3, version=LAST)
            await until(lambda: drain.unacknowledged == ())
        assert not running.done()
    finally:
        stopping.set()
        running.cancel()
        await asyncio.wait({running})
        await channel.close()


async def test_a_learner_that_steps_while_it_joins_is_asked_again_and_an_older_copy_of_it_ends(
    made: MadeRun,
) -> None:
    """Its step is told by another stream, which overtakes the call: the claim was true when it was made."""
    async with running_hub(made) as hub, hub.peer() as learner:
        await join(learner, epoch=1, version=0)
        drain = await learner.drain()
        await drain.step(1)
        assert await drain.acknowledgement() == 1
        later = iter((0, 1))
        versions = [0]

        def held() -> PolicyVersion:
            versions[0] = next(later, versions[0])
            return PolicyVersion(versions[0])

        channel = dial(hub.address, made.learner, purpose=Purpose.CONTROL, now=time.time())
        stopping = asyncio.Event()
        member = asyncio.create_task(
            membership(channel, made.run_id, held).run(ready=stopping.set, stopping=stopping)
        )
        await member
        assert versions == [1]
        with refused(Reason.ROLLBACK, "1"):
            await membership(channel, made.run_id, lambda: PolicyVersion(0)).run(
                ready=lambda: None, stopping=asyncio.Event()
            )
        await channel.close()


def membership(channel: grpc.aio.Channel, run_id: str, held: Callable[[], PolicyVersion]) -> MembershipClient:
    member = Member(
        run_id,
        Role.LEARNER,
        layout_digest=LAYOUT,
        tokenizer_digest=TOKENIZER,
        learner_epoch=1,
        vocabulary_size=100,
    )
    reports = PeerReports(held=held, waits_for=str)
    uplink = Uplink(SystemClock(), Backoff(lambda: 0.1))
    return MembershipClient(channel, member, uplink, reports=reports, notices=Notices())
