"""Runs whose verifiers grade: a real coordinator; samplers, verifiers and the learner real or by hand."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heterorl.v1 import common_pb2, rollout_pb2
from node.coordinator.work.reward_checks import PUT_OFF_S
from node.errors import RefusedError
from node.exit_code import ExitCode
from node.reward_finding import GroupGrades, RewardCheck, RewardFinding
from node.rollout import RolloutGroup
from node.wire.rollouts import encoded_from_wire, finding_to_wire, group_from_wire, group_to_wire
from sampler.engines.torch_engine import TorchEngine
from support.groups import without_grades
from support.hub import HandDrain, HandPeer, RunningHub, answer_to, members, running_hub, submission
from support.identity import MadeRun
from support.judge_server import JudgeServer, judge_server
from support.sampler import learning, sampling, verifying
from support.waiting import eventually, until

SPOOLED = common_pb2.VERDICT_SPOOLED
TIMEOUT_S = 20.0


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server() as running:
        yield running


@dataclass(slots=True)
class HandVerifier:
    """A verifier that answers as a test tells it to."""

    stream: Any

    async def group(self) -> RolloutGroup:
        async with asyncio.timeout(TIMEOUT_S):
            response = await self.stream.read()
        assert isinstance(response, rollout_pb2.CheckRewardsResponse), response
        return group_from_wire(encoded_from_wire(response.group))

    async def say(self, finding: RewardFinding) -> None:
        await self.stream.write(rollout_pb2.CheckRewardsRequest(finding=finding_to_wire(finding)))

    async def grade(self, group_id: str, *rewards: float) -> None:
        grades = GroupGrades(np.array(rewards, np.float32), {"score": np.array(rewards, np.float32)})
        await self.say(RewardFinding(group_id, RewardCheck.GRADED, grades=grades))


@asynccontextmanager
async def hand_verifier(hub: RunningHub, *, groups: int = 4) -> AsyncIterator[HandVerifier]:
    async with hub.peer(hub.made.verifier) as peer:
        joined = await peer.join(grader_digest=b"g" * 16)
        assert joined.verifiers_grade
        stream = peer.rollout.CheckRewards()
        hello = rollout_pb2.VerifierHello(task_digest=joined.task_digest, groups=groups)
        await stream.write(rollout_pb2.CheckRewardsRequest(hello=hello))
        yield HandVerifier(stream)
        stream.cancel()


async def slots(learner: HandPeer) -> dict[str, int]:
    return {state: n for state, n in dict((await learner.status()).slots).items() if n}


async def chain(learner: HandPeer) -> list[str]:
    return [link.waits_for for link in (await learner.status()).waits]


async def next_group(drain: HandDrain) -> RolloutGroup:
    async with asyncio.timeout(60):
        while (response := await drain.hear()).WhichOneof("message") != "group":
            pass
    return group_from_wire(encoded_from_wire(response.group))


async def hand_in(peer: HandPeer, lease: rollout_pb2.PromptLease, **changes: Any) -> Any:
    bare = without_grades(answer_to(lease, run_id=peer.identity.run_id, **changes))
    return await peer.hand_in(submission(bare))


async def test_a_judge_is_asked_by_the_verifier_alone_and_samplers_need_none(
    made: MadeRun, server: JudgeServer, base: TorchEngine, model_dir: Path, tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"{n}+1="}) for n in range(6)))
    judge = {"model": "wise", "template": "{question} {completion}", "score_pattern": r"Score: (\d+)"}
    server.answer = lambda request: request.send(503, "down")
    settings: dict[str, Any] = dict(
        task="jsonl",
        prompts=None,
        data={"file": data},
        task_options={"grader": "judge", "judge": judge},
        graded_by="verifier",
        max_staleness_versions=500,
    )
    asked = {"url": server.url, "models": ["wise"], "attempts": 1, "timeout_s": 5}
    async with (
        running_hub(made, **settings) as hub,
        learning(hub, base, model_dir) as learner,
        sampling(made, hub.address, model_dir),
    ):
        drain = await learner.drain(credits=100)

        async def waits_for_a_verifier() -> bool:
            return (await chain(learner))[1:] == ["a verifier, which grades them"]

        await eventually(waits_for_a_verifier)
        async with verifying(made, hub.address, model_dir, judge=asked) as verifier:
            await until(lambda: verifier.value("checks_total", outcome="skipped") >= 2)
            assert (await learner.status()).bad_prompts_total == 0
            assert "spooled" not in await slots(learner)
            server.answer = lambda request: request.say("Score: 5")
            hub.clock.advance(PUT_OFF_S + 1)
            group = await next_group(drain)
            assert verifier.value("checks_total", outcome="graded") > 0
    assert [completion.reward for completion in group.completions] == [0.5, 0.5]
    assert group.metrics["judge_score"].tolist() == [5.0, 5.0]
    assert group.grader_digest != b""
    assert hub.metric("heterorl_coordinator_reward_checks_total", outcome="graded") > 0


async def test_a_sampler_that_sends_rewards_all_the_same_is_refused_whatever_its_header_says(
    made: MadeRun,
) -> None:
    async with running_hub(made, graded_by="verifier") as hub, members(hub) as (learner, sampler):
        frank, sly = (await sampler.lease(2)).leases
        answer = await sampler.submit(frank)
        assert answer.verdict == common_pb2.VERDICT_MALFORMED
        assert "verifiers grade this run's groups" in answer.detail
        whole = answer_to(sly, run_id=made.run_id)
        encoded = group_to_wire(whole)
        header = group_to_wire(replace(without_grades(whole), graded_at_s=whole.graded_at_s)).header
        hidden = await sampler.hand_in(submission(replace(encoded, header=header)))
        assert hidden.verdict == SPOOLED  # the coordinator reads headers alone
        assert await slots(learner) == {"available": 1, "ungraded": 1}
        async with hub.peer(made.verifier) as peer:
            joined = await peer.join(grader_digest=b"g" * 16)
            stream = peer.rollout.CheckRewards()
            hello = rollout_pb2.VerifierHello(task_digest=joined.task_digest, groups=1)
            await stream.write(rollout_pb2.CheckRewardsRequest(hello=hello))
            response = await stream.read()
            assert isinstance(response, rollout_pb2.CheckRewardsResponse)
            with pytest.raises(RefusedError, match="least_reward = nan, its columns 0"):
                group_from_wire(encoded_from_wire(response.group))
            finding = RewardFinding(sly.lease_id, RewardCheck.UNGRADABLE, "its header says otherwise")
            await stream.write(rollout_pb2.CheckRewardsRequest(finding=finding_to_wire(finding)))

            async def is_thrown_out() -> bool:
                return await slots(learner) == {"available": 2}

            await eventually(is_thrown_out)


async def test_a_sampler_refuses_a_task_that_only_it_could_grade(
    made: MadeRun, base: TorchEngine, model_dir: Path
) -> None:
    async with (
        running_hub(made, task="t", graded_by="verifier") as hub,
        learning(hub, base, model_dir),
        sampling(
            made, hub.address, model_dir, custom_tasks={"t": "support.guessing_task:Guessing"}
        ) as sampler,
    ):
        assert await sampler.ending is ExitCode.CONFIGURATION
