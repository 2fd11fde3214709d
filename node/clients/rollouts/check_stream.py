"""The verifier's half of CheckRewards: groups come, findings go, side by side and in any order."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc.aio

from heterorl.v1 import rollout_pb2, rollout_pb2_grpc
from node.errors import RefusedError
from node.rpc.call_ends import ConnectionLost, classified
from node.system.waits import side_by_side
from node.values.groups.reward_finding import RewardCheck, RewardFinding
from node.values.groups.rollout import EncodedGroup, RolloutGroup
from node.values.groups.well_formed import check_group
from node.wire.rollouts import encoded_from_wire, finding_to_wire, group_from_wire

Check = Callable[[RolloutGroup, bytes], Awaitable[RewardFinding]]
"""Works out the rewards of a group, again or for the first time, given the prompt's row."""


class RewardCheckClient:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = rollout_pb2_grpc.RolloutServiceStub(channel)

    async def answer(
        self,
        check: Check,
        *,
        task_digest: bytes,
        groups: int,
        noise_ratio: float,
        grades_at_once: int,
        grading_limit_s: float,
    ) -> None:
        """Check groups until the stream ends, at most ``groups`` at once; see ``VerifierHello``.

        Raises:
            RefusedError, ConnectionLost: see ``node.rpc.channel``.
        """
        call = self._stub.CheckRewards()
        hello = rollout_pb2.VerifierHello(
            task_digest=task_digest,
            groups=groups,
            noise_ratio=noise_ratio,
            grades_at_once=grades_at_once,
            grading_limit_s=grading_limit_s,
        )
        writing = asyncio.Lock()
        under_way = 0

        async def answer_one(encoded: EncodedGroup, row: bytes) -> None:
            nonlocal under_way
            finding = await _finding(check, encoded, row)
            under_way -= 1  # before the coordinator can know of it and send another
            message = finding_to_wire(finding)
            async with writing:
                await call.write(rollout_pb2.CheckRewardsRequest(finding=message))

        try:
            with classified():
                async with side_by_side() as tasks:
                    # In a task: to a call that is cancelled without a connection it would never be written.
                    tasks.create_task(call.write(rollout_pb2.CheckRewardsRequest(hello=hello)))
                    while isinstance(response := await call.read(), rollout_pb2.CheckRewardsResponse):
                        if under_way == groups:
                            raise ConnectionLost(f"the coordinator sent more than {groups} groups at once")
                        under_way += 1
                        tasks.create_task(answer_one(encoded_from_wire(response.group), response.row))
        finally:
            call.cancel()


async def _finding(check: Check, encoded: EncodedGroup, row: bytes) -> RewardFinding:
    try:
        group = group_from_wire(encoded)
        check_group(group, is_graded=group.is_graded)
    except RefusedError as refused:
        return RewardFinding(encoded.group_id, RewardCheck.UNGRADABLE, str(refused))
    return await check(group, row)
