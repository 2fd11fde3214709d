"""A sampler that lies about rewards: real coordinator, sampler and verifier; the learner by hand."""

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heterorl.v1 import common_pb2, membership_pb2
from node.exit_code import ExitCode
from node.rollout import Finish, RolloutGroup
from sampler.engines.torch_engine import TorchEngine
from sampler.rollouts.group_pipeline import GroupPipeline
from sampler.rollouts.run_task import RunTask
from sampler.rollouts.verification import Verification
from support.by_rpc import say
from support.enrolled import let_in
from support.hub import HandPeer, RunningHub, running_hub
from support.identity import MadeRun
from support.sampler import RunningPeer, learning, sampling, verifying
from support.waiting import eventually, until

HONEST = GroupPipeline._group


def lie(self: GroupPipeline, *arguments: Any, **keywords: Any) -> RolloutGroup:
    group = HONEST(self, *arguments, **keywords)
    inverted = tuple(replace(one, reward=1.0 - one.reward) for one in group.completions)
    return replace(group, completions=inverted)


def checks(hub: RunningHub, outcome: str) -> float:
    return hub.metric("heterorl_coordinator_reward_checks_total", outcome=outcome)


async def standing(learner: HandPeer) -> membership_pb2.PeerStatus:
    status = await learner.status()
    return next(peer for peer in status.peers if peer.role == common_pb2.ROLE_SAMPLER)


async def has_checked(hub: RunningHub, verifier: RunningPeer, groups: int) -> None:
    await until(lambda: checks(hub, "agreed") >= groups)
    assert verifier.value("checks_total", outcome="agreed") >= groups


async def test_a_sampler_with_inverted_rewards_is_shut_out_with_its_groups_until_it_is_pardoned(
    made: MadeRun, base: TorchEngine, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        running_hub(made, max_staleness_versions=500) as hub,
        learning(hub, base, model_dir) as learner,
        verifying(made, hub.address, model_dir) as verifier,
        sampling(made, hub.address, model_dir) as sampler,
    ):
        drain = await learner.drain(credits=1000)
        await has_checked(hub, verifier, 3)
        honest = dict((await learner.status()).slots)["spooled"]
        assert honest > 0
        monkeypatch.setattr(GroupPipeline, "_group", lie)
        await until(lambda: hub.metric("heterorl_coordinator_proven_liars_total") == 1)
        assert hub.metric("heterorl_coordinator_thrown_out_groups_total") >= honest
        told = await standing(learner)
        assert told.standing == "quarantined"
        assert "the grader gives 0" in told.standing_detail
        slots = dict((await learner.status()).slots)
        assert (slots["spooled"], slots["leased"]) == (0, 0)
        async with asyncio.timeout(10):
            while (response := await drain.hear()).WhichOneof("message") != "quarantines":
                pass
        assert [one.sampler_id for one in response.quarantines.samplers] == ["sampler-1"]
        await until(lambda: sampler.value("groups_total", verdict="suspect") >= honest)

        monkeypatch.setattr(GroupPipeline, "_group", HONEST)
        let_in(made.directory, "sampler-1")
        await say(made, "pardon", "sampler-1")

        async def is_forgiven() -> bool:
            return (await standing(learner)).standing == "established"

        await eventually(is_forgiven)


async def test_whoever_states_another_prompt_is_shut_out_though_its_rewards_are_right(
    made: MadeRun, base: TorchEngine, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest_prompt = RunTask.prompt

    async def exchanged(self: RunTask, *arguments: Any) -> Any:
        prompt = await honest_prompt(self, *arguments)
        return replace(prompt, token_ids=prompt.token_ids[::-1].copy())

    async with (
        running_hub(made, max_staleness_versions=500) as hub,
        learning(hub, base, model_dir) as learner,
        verifying(made, hub.address, model_dir) as verifier,
        sampling(made, hub.address, model_dir),
    ):
        await learner.drain(credits=1000)
        await has_checked(hub, verifier, 1)
        monkeypatch.setattr(RunTask, "prompt", exchanged)
        await until(lambda: hub.metric("heterorl_coordinator_proven_liars_total") == 1)
        assert "is not the task's" in (await standing(learner)).standing_detail


async def test_where_verifiers_grade_a_group_with_another_prompt_is_not_trained_on(
    made: MadeRun, base: TorchEngine, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest_prompt = RunTask.prompt

    async def exchanged(self: RunTask, *arguments: Any) -> Any:
        prompt = await honest_prompt(self, *arguments)
        return replace(prompt, token_ids=prompt.token_ids[::-1].copy())

    async with (
        running_hub(made, max_staleness_versions=500, graded_by="verifier") as hub,
        learning(hub, base, model_dir) as learner,
        verifying(made, hub.address, model_dir),
        sampling(made, hub.address, model_dir) as sampler,
    ):
        await learner.drain(credits=1000)
        await until(lambda: checks(hub, "graded") >= 1)
        monkeypatch.setattr(RunTask, "prompt", exchanged)
        await until(lambda: sampler.value("groups_total", verdict="suspect") >= 1)
        assert checks(hub, "ungradable") >= 1


async def test_a_verifier_whose_prompts_nobody_shares_accuses_nobody(
    made: MadeRun, base: TorchEngine, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chat template may be another one."""
    made_here = Verification._made

    async def other(self: Verification, *arguments: Any) -> bytes | None:
        return (await made_here(self, *arguments) or b"") + bytes(4)

    monkeypatch.setattr(Verification, "_made", other)
    async with (
        running_hub(made, max_staleness_versions=500) as hub,
        learning(hub, base, model_dir) as learner,
        verifying(made, hub.address, model_dir) as verifier,
        sampling(made, hub.address, model_dir),
    ):
        await learner.drain(credits=1000)
        await has_checked(hub, verifier, 3)
        assert (await standing(learner)).standing != "quarantined"


@pytest.fixture
def resaved_dir(model_dir: Path, tmp_path: Path) -> Path:
    """Copy the model with two tokens exchanged, so that some prompts and texts are others."""
    copied = Path(shutil.copytree(model_dir, tmp_path / "resaved"))
    path = copied / "tokenizer.json"
    document = json.loads(path.read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]
    path.write_text(json.dumps(document))
    return copied


async def test_a_verifier_with_another_tokenizer_is_refused(
    made: MadeRun, base: TorchEngine, model_dir: Path, resaved_dir: Path
) -> None:
    async with running_hub(made) as hub, learning(hub, base, model_dir):
        async with verifying(made, hub.address, resaved_dir) as verifier:
            assert await asyncio.wait_for(verifier.ending, timeout=20) is ExitCode.COULD_NOT_START
        assert hub.metric("heterorl_coordinator_proven_liars_total") == 0


async def test_a_verifier_with_another_tokenizer_that_came_before_the_learner_ends_and_accuses_nobody(
    made: MadeRun, base: TorchEngine, model_dir: Path, resaved_dir: Path
) -> None:
    async with (
        running_hub(made, max_staleness_versions=500) as hub,
        verifying(made, hub.address, resaved_dir) as verifier,
    ):
        await until(lambda: hub.metric("heterorl_coordinator_verifiers") == 1)
        async with learning(hub, base, model_dir) as learner, sampling(made, hub.address, model_dir):
            await learner.drain(credits=1000)
            await until(lambda: hub.metric("heterorl_coordinator_verifiers") == 0)
            assert (
                await verifier.ending is ExitCode.COULD_NOT_START
            )  # by itself: a drain would win over its error
            assert (await standing(learner)).standing != "quarantined"


async def test_a_verifier_survives_groups_that_nobody_honest_sends(
    made: MadeRun, base: TorchEngine, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token ids below 0 and beyond the vocabulary: both are thrown out, and the next group is checked."""
    strange = iter((-1, 2**31 - 1))

    def twist(self: GroupPipeline, *arguments: Any, **keywords: Any) -> RolloutGroup:
        group = HONEST(self, *arguments, **keywords)
        if (odd := next(strange, None)) is None:
            return group
        first, *others = group.completions
        ids = np.full_like(first.token_ids, odd)
        return replace(group, completions=(replace(first, token_ids=ids, finish=Finish.END), *others))

    monkeypatch.setattr(GroupPipeline, "_group", twist)
    async with (
        running_hub(made, max_staleness_versions=500) as hub,
        learning(hub, base, model_dir) as learner,
        verifying(made, hub.address, model_dir) as verifier,
    ):
        # Groups that come before there is a verifier are believed.
        await until(lambda: hub.metric("heterorl_coordinator_verifiers") == 1)
        async with sampling(made, hub.address, model_dir):
            await learner.drain(credits=1000)
            await until(lambda: checks(hub, "ungradable") == 2)
            await has_checked(hub, verifier, 1)
            assert (await standing(learner)).standing == "established"


async def test_a_run_that_requires_a_verifier_waits_for_one_and_says_so(
    made: MadeRun, base: TorchEngine, model_dir: Path
) -> None:
    async with (
        running_hub(made, max_staleness_versions=500, require_verifier=True) as hub,
        learning(hub, base, model_dir) as learner,
        sampling(made, hub.address, model_dir),
    ):
        drain = await learner.drain(credits=1000)
        groups = hub.hub.peers.accounts.slots.open
        await until(lambda: len(groups.untrained) >= 3, within_s=60)
        assert len(groups.undelivered) == len(groups.untrained)
        assert (
            await learner.status()
        ).headline.waits_for == "a verifier, without which nothing is trained on"
        async with verifying(made, hub.address, model_dir) as verifier, asyncio.timeout(60):
            while (await drain.hear()).WhichOneof("message") != "group":
                pass
            assert verifier.value("checks_total", outcome="agreed") > 0
