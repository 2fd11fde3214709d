"""The verifier's half of a stream of checks, against a hub that sends as a test tells it to."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from heterorl.v1 import rollout_pb2
from node.clients.rollouts.check_stream import RewardCheckClient
from node.errors import Reason, RefusedError
from node.rpc.call_ends import ConnectionLost
from node.rpc.channel import Purpose, dial
from node.values.groups.reward_finding import RewardCheck, RewardFinding
from node.values.groups.rollout import RolloutGroup
from node.wire.rollouts import delivery_to_wire, group_to_wire
from support.groups import make_group
from support.identity import MadeRun
from support.rpc import rpcs, serving

CHECK_REWARDS = "/heterorl.v1.RolloutService/CheckRewards"
AT_ONCE = 2


def asked(number: int) -> rollout_pb2.CheckRewardsResponse:
    group = group_to_wire(make_group(f"{number}.1"))
    return rollout_pb2.CheckRewardsResponse(group=delivery_to_wire(group).group)


async def test_a_hub_that_sends_more_groups_than_were_asked_for_is_left(made: MadeRun) -> None:
    async def serve(requests: Any, context: Any) -> AsyncIterator[rollout_pb2.CheckRewardsResponse]:
        hello = (await anext(requests)).hello
        for number in range(hello.groups + 1):
            yield asked(number)
        await asyncio.Event().wait()

    async def check(group: RolloutGroup, row: bytes) -> RewardFinding:
        await asyncio.Event().wait()
        raise AssertionError(group)

    refused = await ending(made, serve, check)
    assert isinstance(refused, ConnectionLost)
    assert "more than 2 groups at once" in str(refused)


async def test_a_group_may_follow_each_finding_at_once(made: MadeRun) -> None:
    async def serve(requests: Any, context: Any) -> AsyncIterator[rollout_pb2.CheckRewardsResponse]:
        hello = (await anext(requests)).hello
        for number in range(hello.groups):
            yield asked(number)
        for number in range(hello.groups, 50):
            await anext(requests)
            yield asked(number)
        for _ in range(hello.groups):
            await anext(requests)
        raise RefusedError(Reason.BUSY, "that was all")

    async def check(group: RolloutGroup, row: bytes) -> RewardFinding:
        return RewardFinding(group.group_id, RewardCheck.AGREED)

    assert str(await ending(made, serve, check)) == "that was all"


async def ending(made: MadeRun, serve: Any, check: Any) -> Exception:
    """Return how a stream of checks ended."""
    async with (
        serving(made, rpcs({CHECK_REWARDS: serve})) as server,
        dial(server.address, made.verifier, purpose=Purpose.ROLLOUTS, now=time.time()) as channel,
        asyncio.timeout(30),
    ):
        with pytest.raises((ConnectionLost, RefusedError)) as ended:
            await RewardCheckClient(channel).answer(
                check,
                task_digest=b"",
                groups=AT_ONCE,
                noise_ratio=0.0,
                grades_at_once=AT_ONCE,
                grading_limit_s=30.0,
            )
    return ended.value
