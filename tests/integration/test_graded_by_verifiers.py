"""Runs whose verifiers grade: a real coordinator; samplers, verifiers and the learner real or by hand."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heterorl.v1 import common_pb2
from node.coordinator.work.checks.reward_checks import PUT_OFF_S
from node.errors import Reason
from node.exit_code import ExitCode
from node.values.groups.reward_finding import RewardCheck
from node.wire.rollouts import encoded_from_wire, group_from_wire, group_to_wire
from sampler.engines.torch.torch_engine import TorchEngine
from support.by_rpc import delivered, hand_verifier, slots, until_slots
from support.groups import without_grades
from support.hub import HandPeer, answer_to, members, running_hub, submission
from support.identity import MadeRun
from support.judge_server import JudgeServer, judge_server
from support.refusals import refused
from support.sampler import learning, sampling, verifying
from support.waiting import eventually, until

SPOOLED = common_pb2.VERDICT_SPOOLED


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server() as running:
        yield running


async def chain(learner: HandPeer) -> list[str]:
    return [link.waits_for for link in (await learner.status()).waits]


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
            assert verifier.value("grader_outages_total", reason="failed") >= 2
            assert (await learner.status()).bad_prompts_total == 0
            assert "spooled" not in await slots(learner)
            server.answer = lambda request: request.say("Score: 5")
            hub.clock.advance(PUT_OFF_S + 1)
            group = await delivered(drain)
            assert verifier.value("checks_total", outcome="graded") > 0
    assert [completion.reward for completion in group.completions] == [0.5, 0.5]
    assert group.metrics["judge_score"].tolist() == [5.0, 5.0]
    assert group.grader_digest != b""
    assert hub.metric("heterorl_coordinator_reward_checks_total", outcome="graded") > 0


async def test_a_group_whose_columns_have_rewards_that_its_header_hides_is_read_by_nobody(
    made: MadeRun,
) -> None:
    async with running_hub(made, graded_by="verifier") as hub, members(hub) as (learner, sampler):
        (sly,) = (await sampler.lease()).leases
        whole = answer_to(sly, run_id=made.run_id)
        encoded = group_to_wire(whole)
        header = group_to_wire(replace(without_grades(whole), graded_at_s=whole.graded_at_s)).header
        hidden = await sampler.hand_in(submission(replace(encoded, header=header)))
        assert hidden.verdict == SPOOLED  # the coordinator reads headers alone
        assert await slots(learner) == {"ungraded": 1}
        async with hand_verifier(hub) as verifier:
            response = await verifier.stream.read()
            with refused(Reason.MALFORMED, "least_reward = nan", "0"):
                group_from_wire(encoded_from_wire(response.group))
            await verifier.find(sly.lease_id, RewardCheck.UNGRADABLE, "its header says otherwise")
            await until_slots(learner, available=1)


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
