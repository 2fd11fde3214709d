"""Shared by tests of the coordinator through its rpcs: refusals by reason, disks as they lie, verifiers."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest

from heterorl.v1 import common_pb2, membership_pb2, rollout_pb2
from node.commands.cli import main
from node.errors import Reason
from node.identity.identity_store import Identity
from node.rpc.call_ends import REASON_KEY
from node.values.groups.reward_finding import GroupGrades, RewardCheck, RewardFinding
from node.values.groups.rollout import RolloutGroup
from node.wire.rollouts import encoded_from_wire, finding_to_wire, group_from_wire
from support.groups import without_grades
from support.hub import TIMEOUT_S, HandDrain, HandPeer, RunningHub, answer_to, submission
from support.identity import MadeRun
from support.waiting import eventually


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call was refused, as its caller reads it."""

    reason: Reason
    detail: str

    def names(self, *words: str) -> bool:
        """Say whether the detail has each of these names or values."""
        return all(word in self.detail for word in words)


async def refusal_of(call: Awaitable[object]) -> Refusal:
    """Wait for a call that must be refused, and return why it was."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    trailing = dict(error.value.trailing_metadata() or ())
    reason = next(one for one in Reason if one == trailing[REASON_KEY])
    return Refusal(reason, error.value.details() or "")


def disk_of(made: MadeRun, copies: Path) -> MadeRun:
    """Copy all that a run has on disk at this moment, as a machine that loses its power leaves it."""
    directory = copies / f"disk {len(list(copies.glob('disk *')))}"
    shutil.copytree(made.directory, directory, ignore=shutil.ignore_patterns("*.sock"))
    return replace(made, directory=directory)


async def say(made: MadeRun, *words: str) -> None:
    """Say an operator's word with the command that an operator uses."""
    assert await asyncio.to_thread(main, [*words, "--state-dir", str(made.directory)]) == 0


async def spool(sampler: HandPeer, groups: int = 1) -> list[str]:
    """Lease and submit so many groups, and return their ids."""
    leases = (await sampler.lease(groups)).leases
    assert [(await sampler.submit(lease)).verdict for lease in leases] == [SPOOLED] * groups
    return [lease.lease_id for lease in leases]


async def slots(peer: HandPeer) -> dict[str, int]:
    """Return the run's slots by state, without states that no slot is in."""
    return {state: n for state, n in dict((await peer.status()).slots).items() if n}


async def verdicts(peer: HandPeer) -> dict[str, int]:
    """Return how many groups of the run got which verdict."""
    return dict((await peer.status()).verdicts)


async def row_of(peer: HandPeer, node_id: str) -> membership_pb2.PeerStatus:
    """Return what the status says of a node."""
    (row,) = [one for one in (await peer.status()).peers if one.node_id == node_id]
    return row


async def until_slots(peer: HandPeer, **expected: int) -> None:
    """Wait until the run has these slots and no others."""

    async def is_so() -> bool:
        return await slots(peer) == expected

    await eventually(is_so)


async def until_confirmed(peer: HandPeer) -> None:
    """Wait until the coordinator has read a learner's hello; it leases nothing before."""

    async def is_so() -> bool:
        return (await peer.status()).capacity_bound != "learner"

    await eventually(is_so)


async def told(peer: HandPeer) -> list[tuple[str, int]]:
    """Return the verdicts that a heartbeat's answer tells a sampler."""
    return [(one.group_id, one.verdict) for one in (await peer.heartbeat()).verdicts]


async def next_message(drain: HandDrain, kind: str) -> rollout_pb2.DrainRolloutsResponse:
    """Wait for a message of the learner's stream, past those of other kinds."""
    while (response := await drain.hear()).WhichOneof("message") != kind:
        pass
    return response


async def acknowledged(drain: HandDrain, version: int) -> None:
    """Wait until the step to ``version`` is in the ledger."""
    while (await next_message(drain, "step_acknowledged")).step_acknowledged.version != version:
        pass


async def delivered(drain: HandDrain) -> RolloutGroup:
    """Wait for the next group of a learner's stream."""
    return group_from_wire(encoded_from_wire((await next_message(drain, "group")).group))


async def submit_ungraded(peer: HandPeer, lease: rollout_pb2.PromptLease) -> rollout_pb2.SubmissionAnswer:
    """Submit a good group as samplers do where verifiers grade."""
    bare = without_grades(answer_to(lease, run_id=peer.identity.run_id))
    return await peer.hand_in(submission(bare))


@dataclass(slots=True)
class HandVerifier:
    """A verifier that finds what a test tells it to."""

    stream: Any
    joined: membership_pb2.JoinResponse

    async def group(self) -> str:
        """Wait for a group to check and return its id."""
        async with asyncio.timeout(TIMEOUT_S):
            response = await self.stream.read()
        assert isinstance(response, rollout_pb2.CheckRewardsResponse), response
        return response.group.group_id

    async def find(self, group_id: str, outcome: RewardCheck, detail: str = "") -> None:
        await self.say(RewardFinding(group_id, outcome, detail))

    async def grade(self, group_id: str, *rewards: float) -> None:
        grades = GroupGrades(np.array(rewards, np.float32), {})
        await self.say(RewardFinding(group_id, RewardCheck.GRADED, grades=grades))

    async def say(self, finding: RewardFinding) -> None:
        await self.stream.write(rollout_pb2.CheckRewardsRequest(finding=finding_to_wire(finding)))


@asynccontextmanager
async def hand_verifier(
    hub: RunningHub, identity: Identity | None = None, **hello: Any
) -> AsyncIterator[HandVerifier]:
    """Join as a verifier, with a stream on which groups to check come."""
    async with hub.peer(identity or hub.made.verifier) as peer:
        joined = await peer.join()
        values: dict[str, Any] = {"task_digest": joined.task_digest, "groups": 4}
        stream = peer.rollout.CheckRewards(timeout=TIMEOUT_S)
        await stream.write(
            rollout_pb2.CheckRewardsRequest(hello=rollout_pb2.VerifierHello(**(values | hello)))
        )
        yield HandVerifier(stream, joined)
        stream.cancel()


SPOOLED = common_pb2.VERDICT_SPOOLED
ACCEPTED = common_pb2.VERDICT_ACCEPTED
TRAINED = common_pb2.VERDICT_TRAINED
DUPLICATE = common_pb2.VERDICT_DUPLICATE
FOREIGN = common_pb2.VERDICT_FOREIGN
MALFORMED = common_pb2.VERDICT_MALFORMED
STALE = common_pb2.VERDICT_STALE
SUSPECT = common_pb2.VERDICT_SUSPECT
UNINFORMATIVE = common_pb2.VERDICT_UNINFORMATIVE
