"""The peers of ``bench.peers`` at a real coordinator: they join, send heartbeats and metrics."""

import asyncio
import json

import pytest

from bench.peer_lab.generator import Fleet, JoinRefusedError
from support.hub import RunningHub
from support.waiting import eventually


async def test_peers_of_the_lab_are_members_that_send_heartbeats_and_metrics(hub: RunningHub) -> None:
    fleet = Fleet(hub.made.directory, hub.address, every_s=0.05)
    await fleet.open(range(4))
    async with hub.peer(hub.made.operator) as operator:
        status = await operator.status()
        assert sorted(peer.node_id for peer in status.peers) == [
            "learner",
            *(f"sampler-{n}" for n in (1, 2, 3)),
        ]
        assert {peer.state for peer in status.peers} <= {"joined", "live"}

        hub.clock.advance(2)

        async def has_metrics() -> bool:
            labels = {"node": "sampler-2", "role": "sampler"}
            return hub.metric("heterorl_coordinator_peer_tokens_per_second", **labels) == 1500

        await eventually(has_metrics)
    seen = json.loads(fleet.report())
    assert seen["heartbeats"] >= 4
    assert all(0 < latency_s < 60 for latency_s in seen["latencies_s"])
    assert (seen["lost"], seen["pause_s"]) == (0, pytest.approx(0.05))
    fleet.close()


async def test_a_peer_of_the_lab_that_is_not_let_in_says_so(hub: RunningHub) -> None:
    fleet, twin = (Fleet(hub.made.directory, hub.address, every_s=60.0, attempts=1) for _ in range(2))
    await fleet.open([1])
    with pytest.raises(JoinRefusedError, match="sampler-1 could not join"):
        async with asyncio.timeout(60):
            await twin.open([1])
    fleet.close()
