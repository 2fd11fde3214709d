"""More samplers than the coordinator's disk can answer: who goes first, what is dropped, how it ends."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio
import pytest

from heterorl.v1 import membership_pb2, rollout_pb2
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.work.accounts import Transaction
from node.run import Role
from support.hub import TIMEOUT_S, HandPeer, RunningHub, running_hub
from support.identity import MadeRun
from support.waiting import until

CALLERS = 1000
SAMPLERS = 20
"""Who they are: each may have 64 requests waiting."""
WRITE_S = 0.3
"""Duration of a commit, whatever shares it."""
GONE = (
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,  # by a server that closes its connections
)

ON_THEIR_WAY = 20
"""Grants whose callers went after they were sent: those end by their term."""
PATIENCE_S = 1.0
"""A caller's deadline: less than half of what it takes to answer them all."""


@pytest.fixture
def slow_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Ledger.record

    def slowly(ledger: Ledger, *transactions: Transaction) -> None:
        time.sleep(WRITE_S)
        record(ledger, *transactions)

    monkeypatch.setattr(Ledger, "record", slowly)


async def asking(sampler: HandPeer, *, patience_s: float) -> rollout_pb2.LeasePromptsResponse | None:
    request = rollout_pb2.LeasePromptsRequest(max_leases=1, held=sampler.held)
    try:
        return await sampler.rollout.LeasePrompts(request, timeout=patience_s)
    except grpc.aio.AioRpcError as error:
        if error.code() not in GONE:
            raise
        return None


@asynccontextmanager
async def crowded_hub(made: MadeRun) -> AsyncIterator[tuple[RunningHub, HandPeer, list[HandPeer]]]:
    """Run a coordinator with room for every caller; its learner, a sampler and a crowd have joined."""
    async with (
        running_hub(made, concurrency_groups=4096, buffer_groups=4096, batch_groups=2048) as hub,
        hub.peer() as learner,
        hub.peer(made.sampler) as sampler,
        AsyncExitStack() as stack,
    ):
        await learner.join()
        await sampler.join()
        await learner.drain()
        crowd = [
            await stack.enter_async_context(hub.peer(made.issue(Role.SAMPLER, f"crowd-{n}")))
            for n in range(SAMPLERS)
        ]
        for each in crowd:
            await each.join()
        yield hub, sampler, crowd


@pytest.mark.usefixtures("slow_ledger")
async def test_beside_a_thousand_callers_heartbeats_are_answered_and_only_those_who_wait_are_leased_to(
    made: MadeRun,
) -> None:
    async with crowded_hub(made) as (hub, sampler, crowd):
        callers = [
            asyncio.create_task(asking(crowd[n % SAMPLERS], patience_s=PATIENCE_S)) for n in range(CALLERS)
        ]
        # One stream, as a sampler has: its messages are spaced where there are too many, never refused.
        heartbeats = sampler.membership.Heartbeat(timeout=TIMEOUT_S)
        longest_s = 0.0
        while not all(caller.done() for caller in callers):
            started_s = time.monotonic()
            await heartbeats.write(membership_pb2.HeartbeatRequest(sequence=1))
            await heartbeats.read()
            longest_s = max(longest_s, time.monotonic() - started_s)
        heartbeats.cancel()
        heard = sum(len(grant.leases) for caller in callers if (grant := caller.result()) is not None)
        assert 0 < heard < CALLERS
        # What was leased to callers who went during its commit is free again.
        held = hub.hub.spool.accounts.slots.open.by_holder
        await until(lambda: sum(map(len, held.values())) - heard <= ON_THEIR_WAY)
        assert hub.metric("heterorl_coordinator_dropped_decisions_total", cause="gone") > 0
        assert longest_s < 2.0


@pytest.mark.usefixtures("slow_ledger")
async def test_the_coordinator_ends_in_time_while_a_thousand_callers_wait(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "WRITE_S", 2.0)
    async with crowded_hub(made) as (hub, _, crowd):
        callers = [asyncio.create_task(asking(crowd[n % SAMPLERS], patience_s=60)) for n in range(CALLERS)]
        await asyncio.wait(callers, return_when=asyncio.FIRST_COMPLETED)
        started_s = time.monotonic()
        hub.stopping.set()
        await hub.running
        # drain_timeout_s / 2 for rpcs in flight, a second for connections; eight commits take 16.
        assert time.monotonic() - started_s < 10.0
        answers = await asyncio.gather(*callers)
        assert any(answer is None for answer in answers)
