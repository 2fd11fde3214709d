"""More samplers than the coordinator's disk can answer, over real connections."""

import asyncio
import threading
from contextlib import AsyncExitStack

import pytest

from heterorl.v1 import membership_pb2
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.transactions import request_queue, run_ledger
from node.coordinator.work.balance import Transaction
from node.values.roles import Role
from support.hub import TIMEOUT_S, joined
from support.identity import MadeRun
from support.waiting import eventually, until

CALLERS = 240
SAMPLERS = 5
"""Who they are: each may have 64 requests waiting."""


async def test_while_callers_wait_for_the_disk_heartbeats_are_answered_and_those_who_go_are_leased_nothing(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_queue, "WAIT_S", 2 * TIMEOUT_S)
    is_open = threading.Event()
    is_open.set()
    record = Ledger.record

    def record_when_open(ledger: Ledger, *writes: Transaction) -> None:
        is_open.wait()
        record(ledger, *writes)

    monkeypatch.setattr(Ledger, "record", record_when_open)
    names = [made.issue(Role.SAMPLER, f"crowd-{n}") for n in range(SAMPLERS)]
    room = {"concurrency_groups": 4096, "buffer_groups": 4096, "batch_groups": 2048}
    async with (
        joined(made, made.sampler, *names, **room) as (hub, learner, sampler, *crowd),
        AsyncExitStack() as stack,
    ):
        await learner.drain()
        # One stream, as a sampler has: its messages are spaced where there are too many, never refused.
        heartbeats = sampler.membership.Heartbeat(timeout=4 * TIMEOUT_S)
        is_open.clear()
        stack.callback(is_open.set)
        callers = [asyncio.create_task(crowd[n % SAMPLERS].lease()) for n in range(CALLERS)]

        def waiting() -> float:
            return float(hub.metric("heterorl_coordinator_waiting_requests"))

        async def is_answered_while_all_wait() -> bool:
            await heartbeats.write(membership_pb2.HeartbeatRequest(sequence=1))
            await heartbeats.read()
            return waiting() >= CALLERS - run_ledger.BATCH_REQUESTS

        await eventually(is_answered_while_all_wait)
        patient = callers[3::4]
        for caller in set(callers) - set(patient):
            caller.cancel()  # the first caller too, whose lease is in the commit that is under way
        # The coordinator's own upkeep, once a second, may have come to wait behind the commit.
        await until(lambda: waiting() <= len(patient) + 1)
        is_open.set()
        granted = await asyncio.gather(*patient)
        assert [len(grant.leases) for grant in granted] == [1] * len(patient)
        held = hub.hub.accounts.slots.open.by_holder
        await until(lambda: sum(map(len, held.values())) == len(patient))
        assert hub.metric("heterorl_coordinator_dropped_decisions_total", cause="gone") > 0
        heartbeats.cancel()
