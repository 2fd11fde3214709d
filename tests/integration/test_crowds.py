"""More samplers than the coordinator's disk can answer: who goes first, what is dropped, how it ends."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio
import pytest

from heterorl.v1 import membership_pb2, rollout_pb2
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.transactions import request_queue, run_ledger
from node.coordinator.work.balance import Transaction
from node.values.roles import Role
from support.hub import TIMEOUT_S, HandPeer, RunningHub, running_hub
from support.identity import MadeRun
from support.waiting import until

CALLERS = 1000
SAMPLERS = 20
"""Who they are: each may have 64 requests waiting."""
WRITE_S = 2.0
"""Duration of a commit, whatever shares it."""
GONE = (
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,  # by a server that closes its connections
)


class Gate:
    """A ledger that writes as often as it is let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[int] = []
        """Transactions of each commit since the gate was shut, also of the one that waits at it."""
        self._allowed = threading.Semaphore(0)
        self._is_shut = False
        record = Ledger.record

        def gated(ledger: Ledger, *writes: Transaction) -> None:
            if self._is_shut:
                self.begun.append(len(writes))
                self._allowed.acquire()
            record(ledger, *writes)

        monkeypatch.setattr(Ledger, "record", gated)

    def shut(self) -> None:
        self._is_shut = True

    def let(self, commits: int) -> None:
        self._allowed.release(commits)

    def open(self) -> None:
        """Let the commit that waits, and all others."""
        self._is_shut = False
        self.let(1)


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


async def test_beside_a_thousand_callers_heartbeats_are_answered_and_only_those_who_wait_are_leased_to(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_queue, "WAIT_S", 2 * TIMEOUT_S)
    gate = Gate(monkeypatch)
    async with crowded_hub(made) as (hub, sampler, crowd):
        held = hub.hub.accounts.slots.open.by_holder
        # One stream, as a sampler has: its messages are spaced where there are too many, never refused.
        heartbeats = sampler.membership.Heartbeat(timeout=4 * TIMEOUT_S)

        async def answered_until(is_so: Callable[[], bool]) -> None:
            async with asyncio.timeout(TIMEOUT_S):
                while not is_so():
                    await heartbeats.write(membership_pb2.HeartbeatRequest(sequence=1))
                    await heartbeats.read()

        def waiting() -> float:
            return hub.metric("heterorl_coordinator_waiting_requests")

        def heard() -> int:
            answered = (caller.result() for caller in callers if caller.done() and not caller.cancelled())
            return sum(len(grant.leases) for grant in answered if grant is not None)

        def leased() -> int:
            return sum(map(len, held.values()))

        gate.shut()
        callers = [
            asyncio.create_task(asking(crowd[n % SAMPLERS], patience_s=2 * TIMEOUT_S)) for n in range(CALLERS)
        ]
        # Heartbeats do not wait for the commit that all those wait for.
        await answered_until(lambda: waiting() >= CALLERS - run_ledger.BATCH_REQUESTS)
        gate.let(2)
        await answered_until(lambda: len(gate.begun) == 3 and heard() == sum(gate.begun[:2]))
        assert gate.begun[2] > 0
        for caller in callers:
            caller.cancel()
        # The coordinator's own upkeep, once a second, may have come to wait behind the commit.
        await answered_until(lambda: waiting() <= 1)
        gate.open()
        # What was leased to callers who went during its commit is free again.
        await until(lambda: leased() == heard())
        assert 0 < heard() < CALLERS
        assert hub.metric("heterorl_coordinator_dropped_decisions_total", cause="gone") > 0
        heartbeats.cancel()


async def test_the_coordinator_ends_in_time_while_a_thousand_callers_wait(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Ledger.record

    commits = 0

    def slowly(ledger: Ledger, *writes: Transaction) -> None:
        nonlocal commits
        time.sleep(WRITE_S)
        record(ledger, *writes)
        commits += 1

    async with crowded_hub(made) as (hub, _, crowd):
        monkeypatch.setattr(Ledger, "record", slowly)
        callers = [asyncio.create_task(asking(crowd[n % SAMPLERS], patience_s=60)) for n in range(CALLERS)]
        await asyncio.wait(callers, return_when=asyncio.FIRST_COMPLETED)
        done = commits
        hub.stopping.set()
        await hub.running
        # While rpcs in flight have drain_timeout_s / 2 to end; to answer all would take eight.
        assert commits - done <= 3
        answers = await asyncio.gather(*callers)
        assert any(answer is None for answer in answers)
