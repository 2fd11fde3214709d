"""A sampler that lies about rewards: real coordinator, sampler and verifier; the learner by hand."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heterorl.v1 import common_pb2, membership_pb2
from node.values.groups.rollout import Finish, RolloutGroup
from sampler.engines.torch.torch_engine import TorchEngine
from sampler.rollouts.group_pipeline import GroupPipeline
from sampler.rollouts.run_task import RunTask
from sampler.rollouts.verification import Verification
from support.hub import HandPeer, RunningHub, running_hub
from support.identity import MadeRun
from support.sampler import RunningPeer, learning, sampling, verifying
from support.waiting import until

HONEST = GroupPipeline._group
HONEST_PROMPT = RunTask.prompt


Checked = Callable[..., AbstractAsyncContextManager[tuple[RunningHub, HandPeer, RunningPeer, RunningPeer]]]


@pytest.fixture
def checked(made: MadeRun, base: TorchEngine, model_dir: Path) -> Checked:
    """Return what runs a coordinator, the learner by hand, a verifier and a sampler."""

    @asynccontextmanager
    async def running(
        **settings: Any,
    ) -> AsyncIterator[tuple[RunningHub, HandPeer, RunningPeer, RunningPeer]]:
        async with (
            running_hub(made, max_staleness_versions=500, **settings) as hub,
            learning(hub, base, model_dir) as learner,
            verifying(made, hub.address, model_dir) as verifier,
        ):
            # Groups that come before there is a verifier are believed.
            await until(lambda: hub.metric("heterorl_coordinator_verifiers") == 1)
            async with sampling(made, hub.address, model_dir) as sampler:
                await learner.drain(credits=1000)
                yield hub, learner, verifier, sampler

    return running


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


async def other_prompt(self: RunTask, *arguments: Any) -> Any:
    prompt = await HONEST_PROMPT(self, *arguments)
    return replace(prompt, token_ids=prompt.token_ids[::-1].copy())


LIES = {
    "inverted rewards": (GroupPipeline, "_group", lie),
    "another prompt": (RunTask, "prompt", other_prompt),
}


@pytest.mark.parametrize(("lie", "told"), [("inverted rewards", "0"), ("another prompt", "the task's")])
async def test_a_sampler_that_lies_is_found_by_the_verifier_and_shut_out(
    checked: Checked, monkeypatch: pytest.MonkeyPatch, lie: str, told: str
) -> None:
    async with checked() as (hub, learner, verifier, sampler):
        await has_checked(hub, verifier, 1)
        monkeypatch.setattr(*LIES[lie])
        await until(lambda: hub.metric("heterorl_coordinator_proven_liars_total") == 1)
        shown = await standing(learner)
        assert (shown.standing, told in shown.standing_detail) == ("quarantined", True)
        await until(lambda: sampler.value("groups_total", verdict="suspect") >= 1)


async def test_where_verifiers_grade_a_group_with_another_prompt_is_not_trained_on(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with checked(graded_by="verifier") as (hub, _, _, sampler):
        await until(lambda: checks(hub, "graded") >= 1)
        monkeypatch.setattr(RunTask, "prompt", other_prompt)
        await until(lambda: sampler.value("groups_total", verdict="suspect") >= 1)
        assert checks(hub, "ungradable") >= 1


async def test_a_verifier_whose_prompts_nobody_shares_accuses_nobody(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chat template may be another one."""
    made_here = Verification._made

    async def other(self: Verification, *arguments: Any) -> bytes | None:
        return (await made_here(self, *arguments) or b"") + bytes(4)

    monkeypatch.setattr(Verification, "_made", other)
    async with checked() as (hub, learner, verifier, _):
        await has_checked(hub, verifier, 3)
        assert (await standing(learner)).standing != "quarantined"


async def test_a_verifier_survives_groups_that_nobody_honest_sends(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
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
    async with checked() as (hub, learner, verifier, _):
        await until(lambda: checks(hub, "ungradable") == 2)
        await has_checked(hub, verifier, 1)
        assert (await standing(learner)).standing == "established"
