"""A coordinator as a process of its own while a thousand callers ask: steps go on, and SIGTERM ends it."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc.aio
import pytest

from heterorl.v1 import common_pb2, rollout_pb2
from node.identity.identity_store import Identity
from node.rpc.channel import Purpose, dial
from node.run import Role
from support.groups import SAMPLING
from support.hub import HandPeer
from support.identity import MadeRun, make_run

Answer = TypeVar("Answer")

SAMPLERS = 20
CALLERS = 50
"""Number of each."""
STEPS = 5


def peer(address: str, identity: Identity, purpose: Purpose) -> HandPeer:
    return HandPeer(identity, dial(address, identity, purpose=purpose, now=time.time()))


async def ask_for_ever(crowd: HandPeer) -> None:
    """Lease again and again and keep none of it, as a thousand samplers that time out do."""
    request = rollout_pb2.LeasePromptsRequest(max_leases=1, held=crowd.held)
    while True:
        try:
            grant = await crowd.rollout.LeasePrompts(request, timeout=5)
            returned = rollout_pb2.ReleaseLeasesRequest(lease_ids=[lease.lease_id for lease in grant.leases])
            await crowd.rollout.ReleaseLeases(returned, timeout=5)
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.5)


async def patiently(call: Callable[[], Awaitable[Answer]]) -> Answer:
    """Call until it is answered, as a peer does while the coordinator starts or is busy."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)


async def start(made: MadeRun, log: Path, keys: Mapping[str, object]) -> asyncio.subprocess.Process:
    settings = (text for key, value in keys.items() for text in ("--set", f"coordinator.{key}={value}"))
    with log.open("wb") as file:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "node", "--role", "coordinator", "--state-dir", str(made.directory)),
            *("--run-file", str(made.directory / "run.json"), *settings),
            stdout=file,
            stderr=file,
            env=os.environ,
        )


@pytest.mark.timeout(240)
async def test_steps_go_on_beside_a_thousand_callers_and_sigterm_ends_the_coordinator_in_time(
    tmp_path: Path,
) -> None:
    made = make_run(tmp_path, now=time.time())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    keys = {
        "listen": address,
        "enrolment_listen": "127.0.0.1:0",
        "task": "addition",
        "prompts": 100_000,
        "group_size": 2,
        "batch_groups": 1024,
        "max_new_tokens": SAMPLING.max_new_tokens,
        "max_staleness_versions": 64,
        "concurrency_groups": 4096,
        "buffer_groups": 4096,
    }
    process = await start(made, tmp_path / "log", keys)
    crowding: list[asyncio.Task[None]] = []
    try:
        learner = peer(address, made.learner, Purpose.CONTROL)
        sampler = peer(address, made.sampler, Purpose.ROLLOUTS)
        crowd = [
            peer(address, made.issue(Role.SAMPLER, f"crowd-{n}"), Purpose.ROLLOUTS) for n in range(SAMPLERS)
        ]
        for each in (learner, sampler, *crowd):
            await patiently(each.join)
        drain = await learner.drain(credits=100)
        crowding = [asyncio.create_task(ask_for_ever(each)) for each in crowd for _ in range(CALLERS)]
        for version in range(1, STEPS + 1):
            (lease,) = (await patiently(sampler.lease)).leases
            await patiently(partial(sampler.submit, lease))
            group_id = await drain.group()
            await drain.judge(group_id, common_pb2.VERDICT_ACCEPTED)
            await drain.step(version, group_id)
            while await drain.acknowledgement() < version:
                pass
            await sampler.heartbeat()
        process.send_signal(signal.SIGTERM)
        # Half of node.drain_timeout_s for rpcs in flight, then at once.
        assert await asyncio.wait_for(process.wait(), timeout=40) == 0
    finally:
        for task in crowding:
            task.cancel()
        if process.returncode is None:
            process.kill()
            await process.wait()
