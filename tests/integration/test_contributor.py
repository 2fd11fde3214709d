"""A contributor with its trainer, over mTLS, at a learner whose merges the test decides."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.contributor.contributor_state import GROUPS, MERGED, ContributorState
from learner.contributor.held_words import HeldWords
from learner.contributor.local_trainer import SCHEDULE_ENDED
from learner.merging.contribution import ContributionReport
from learner.merging.merge_settings import MergeSettings
from learner.model.model import Policy, load_policy
from learner.step.step_inputs import StepInputs
from learner.step.trainer import Trainer
from learner.step_settings import StepSettings
from node.errors import Reason, RefusedError, StartupError
from node.values.contribution import MergeTerms
from node.values.groups.rollout import RolloutGroup
from node.wire.rollouts import group_from_wire, group_to_wire
from support.groups import make_group
from support.identity import MadeRun
from support.merging_learner import Contributing, contributing
from support.step_settings import make_step_settings
from support.tiny_model import make_tiny_model
from support.waiting import until

IN_STEP = MergeSettings(method="in_step")
STEP = make_step_settings(learning_rate=1e-2)

Start = Callable[..., AbstractAsyncContextManager[Contributing]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def start(made: MadeRun, tmp_path: Path, model_dir: Path) -> Start:
    @asynccontextmanager
    async def contributor(
        merge: MergeSettings = IN_STEP, step: StepSettings = STEP, **options: Any
    ) -> AsyncIterator[Contributing]:
        async with contributing(made, tmp_path, model_dir, step=step, merge=merge, **options) as running:
            yield running

    return contributor


def group(number: int, *, version: int = 0, reward: float = 1.0) -> RolloutGroup:
    """Return a group that teaches something, unless its rewards are equal."""
    prompt = np.array([number % 10 + 2, 3, 4], np.int32)
    made = make_group(f"{number}.0", version=version, prompt_token_ids=prompt, sampler_id="sampler-1")
    first, second = made.completions
    rewarded = (replace(first, reward=0.0), replace(second, reward=reward))
    return replace(made, completions=rewarded)


def as_read(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    return [group_from_wire(group_to_wire(one)) for one in groups]


def same(ours: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return all(torch.equal(ours[name], others[name]) for name in others)


def masters_of(policy: Policy) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in policy.parameters.items()}


async def merged_alone(running: Contributing, number: int) -> ContributionReport:
    """Merge a contribution as the only one, publish it and answer; wait until the contributor is there."""
    one = await running.learner.contribution(number)
    version = running.learner.merge_in(one)
    running.learner.answer(number, version)
    await until(lambda: running.version == version)
    return one.report


async def test_one_contributor_in_step_is_a_learner_to_the_bit(start: Start, model_dir: Path) -> None:
    """H 1, gamma 1, beta 0: masters at both ends are those of the same steps taken in one place."""
    alone = Trainer(load_policy(model_dir, device="cpu"), STEP)
    async with start() as running:
        for version in range(4):
            batch = [group(2 * version + n, version=version) for n in range(2)]
            await running.learner.deal(*batch)
            report = await merged_alone(running, version + 1)
            outcome = alone.step(StepInputs(as_read(batch), version, STEP))
            assert outcome.is_applied
            assert [step.numbers for step in report.steps] == [outcome.numbers]
            assert report.steps[0].kl_nats_of_groups == outcome.kl_nats_of_groups
            assert same(running.masters, masters_of(alone.policy))
            assert same(running.learner.masters, masters_of(alone.policy))
        assert running.shown("contributions_total", outcome="merged") == 4
        assert running.shown("batches_total", outcome="step") == 4


async def test_several_steps_are_handed_in_together_with_their_groups(start: Start) -> None:
    async with start(MergeSettings(method="diloco", local_steps=2)) as running:
        await running.learner.deal(group(0), group(1))
        await running.learner.deal(group(2), group(3))
        one = await running.learner.contribution(1)
        assert [[g.group_id for g in step.groups] for step in one.report.steps] == [
            ["0.0", "1.0"],
            ["2.0", "3.0"],
        ]
        assert {g.sampler_id for g in one.report.groups} == {"sampler-1"}
        change = running.learner.change_of(one)
        norm = torch.stack([part.square().sum() for part in change.values()]).sum().sqrt()
        assert running.shown("change_norm") == pytest.approx(float(norm))
        assert one.header.base_version == 0
        await until(lambda: running.node_metrics.waits_for == MERGED)


@pytest.mark.parametrize("overlap", ["eager", "delayed"])
async def test_steps_taken_while_a_change_travels_are_handed_in_once(start: Start, overlap: Any) -> None:
    """All contributions add up to how far the contributor came, where it is alone."""
    merge = MergeSettings(method="in_step", overlap=overlap)
    async with start(merge) as running:
        before = masters_of(running.policy)
        await running.learner.deal(group(0), group(1))
        first = await running.learner.contribution(1)
        await running.learner.deal(group(2), group(3))
        await until(lambda: running.shown("batches_total", outcome="step") == 2)
        running.learner.answer(1, running.learner.merge_in(first))
        second = await running.learner.contribution(2)
        assert second.header.base_version == 1
        handed_in = [running.learner.change_of(one) for one in (first, second)]
        for name, first_masters in before.items():
            # Delayed, its own second part is not there before it is merged.
            parts = [one[name] for one in handed_in[: 2 if overlap == "eager" else 1]]
            came_to = (first_masters.double() + sum(parts)).float()
            torch.testing.assert_close(came_to, running.masters[name])


async def test_a_change_of_words_leaves_what_is_below_them_for_the_next(start: Start) -> None:
    async with start(MergeSettings(method="word_changes", local_steps=1, overlap="wait")) as running:
        for version in range(3):
            batch = [group(2 * version + n, version=version) for n in range(2)]
            await running.learner.deal(*batch)
            await merged_alone(running, version + 1)
        words = running.learner.policy.layout.words
        assert all(
            torch.equal(one.bfloat16(), running.learner.masters[name].bfloat16())
            for name, one in running.masters.items()
        )
        assert max(len(one.payload) for one in running.learner.handed_in) < 2 * words


async def test_a_fragment_travels_and_the_others_wait_for_their_turn(start: Start) -> None:
    merge = MergeSettings(method="in_step", fragments=2)
    async with start(merge) as running:
        await running.learner.deal(group(0), group(1))
        first = set(running.learner.change_of(await running.learner.contribution(1)))
        await merged_alone(running, 1)
        await running.learner.deal(group(2, version=1), group(3, version=1))
        second = await running.learner.contribution(2)
        change = running.learner.change_of(second)
        assert first.isdisjoint(change)
        assert first | set(change) == set(running.masters)
        running.learner.merge_in(second)
        for name in change:
            assert torch.equal(running.learner.masters[name], running.masters[name]), (
                "with both rounds' steps"
            )


async def test_a_batch_that_teaches_nothing_is_handed_in_without_a_change(start: Start) -> None:
    async with start() as running:
        await running.learner.deal(group(0, reward=0.0), group(1, reward=0.0))
        one = await running.learner.contribution(1)
        assert one.payload == b""
        assert one.report.steps == ()
        assert [g.group_id for g in one.report.uninformative] == ["0.0", "1.0"]
        running.learner.answer(1, 0)
        await until(lambda: running.node_metrics.waits_for == GROUPS)
        assert running.shown("batches_total", outcome="uninformative") == 1


async def test_a_refused_contribution_is_undone(start: Start) -> None:
    async with start() as running:
        before = masters_of(running.policy)
        await running.learner.deal(group(0), group(1))
        await running.learner.contribution(1)
        running.learner.answer(1, None, "it names group 0.0, which another holds")
        await until(lambda: running.shown("contributions_total", outcome="refused") == 1)
        await until(lambda: running.node_metrics.waits_for == GROUPS)
        assert same(running.masters, before)


async def test_a_cut_connection_loses_nothing_and_the_contribution_comes_again(start: Start) -> None:
    async with start() as running:
        await running.learner.deal(group(0), group(1))
        first = await running.learner.contribution(1)
        await running.learner.deal(group(2))
        await until(lambda: running.shown("held_groups") == 1)
        running.learner.handed_in.clear()
        running.learner.cut()
        again = await running.learner.contribution(1)
        assert (again.header, again.payload) == (first.header, first.payload)
        assert sorted(running.learner.hellos[-1].held_group_ids) == ["0.0", "1.0", "2.0"]
        assert running.shown("lost_streams_total") == 1
        await merged_alone(running, 1)


async def test_a_version_of_others_is_taken_over_before_the_first_step(start: Start) -> None:
    async with start() as running:
        await running.learner.deal(group(0))
        for theta in running.learner.masters.values():
            theta += 1.0
        running.learner.make_version()
        await until(lambda: running.version == 1)
        for name, one in running.learner.masters.items():
            assert torch.equal(running.masters[name], one.bfloat16().float())


async def test_terms_that_come_while_versions_are_looked_up_are_the_trainers_before_it_moves(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, newest, hear = threading.Event(), HeldWords.newest, ContributorState.told

    def looks_up(words: HeldWords) -> int:
        assert told.wait(10)
        return newest(words)

    def hears(state: ContributorState, terms: MergeTerms) -> None:
        hear(state, terms)
        told.set()

    monkeypatch.setattr(HeldWords, "newest", looks_up)
    monkeypatch.setattr(ContributorState, "told", hears)
    async with start() as running:
        running.learner.make_version()
        await until(lambda: running.version == 1 or running.task.done())
        assert not running.task.done()


async def test_a_stop_hands_in_what_is_trained_and_gives_the_rest_back(start: Start) -> None:
    async with start(MergeSettings(method="in_step", local_steps=4)) as running:
        await running.learner.deal(group(0), group(1))
        await until(lambda: running.shown("batches_total", outcome="step") == 1)
        await running.learner.deal(group(2))
        await until(lambda: running.shown("held_groups") == 1)
        running.stopping.set()
        one = await running.learner.contribution(1)
        running.learner.answer(1, running.learner.merge_in(one))
        await running.stop()
        assert [g.group_id for g in one.report.groups] == ["0.0", "1.0"]
        assert running.learner.hellos[-1].held_group_ids == []


async def test_steps_at_a_rate_of_zero_say_so(start: Start) -> None:
    over = make_step_settings(learning_rate=1e-2, lr_schedule="linear", decay_steps=1, final_lr_share=0.0)
    async with start(step=over) as running:
        await running.learner.deal(group(0), group(1))
        await merged_alone(running, 1)
        await running.learner.deal(group(2, version=1), group(3, version=1))
        one = await running.learner.contribution(2)
        assert not any(part.any() for part in running.learner.change_of(one).values())
        assert running.trainer.notice == SCHEDULE_ENDED
        assert running.shown("idle_steps_total") == 1


async def test_another_model_than_the_runs_ends_it(start: Start) -> None:
    async with start() as running:
        await until(lambda: len(running.learner.hellos) == 1)
        running.learner.refuses = RefusedError(Reason.LAYOUT_MISMATCH, "another model")
        running.learner.cut()
        with pytest.raises(RefusedError) as refused:
            await asyncio.wait_for(asyncio.shield(running.task), 60)
        assert refused.value.reason is Reason.LAYOUT_MISMATCH


async def test_an_objective_that_is_not_built_in_is_not_imported(start: Start) -> None:
    own = make_step_settings(objective="os.path:join")
    async with start(step=own) as running:
        with pytest.raises(StartupError) as refused:
            await asyncio.wait_for(asyncio.shield(running.task), 60)
        assert "os.path:join" in refused.value.what
