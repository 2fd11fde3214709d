"""A learner that was killed takes the steps since its checkpoint again, from its own journal."""

import asyncio
import math
import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.kill_lab.noise import disturb_moments
from learner.journal.checkpoint_index import versions_in
from learner.journal.step_journal import FILE
from learner.masters.master_words import root_of
from learner.model.model import Policy
from node.errors import StartupError
from node.values.policy import PolicyVersion
from support.gpu import DEVICE
from support.groups import make_completion
from support.scripted_hub import ScriptedHub, scripted_hub
from support.training_loop import BATCH, RunningLearner, learner
from support.waiting import until


def parameters(policy: Policy) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in policy.tensors.values()]).clone()


def head_of(running: RunningLearner) -> PolicyVersion:
    return PolicyVersion(running.loop.version, root_of(running.policy.master_words))


async def take_steps(hub: ScriptedHub, running: RunningLearner, *, until_version: int) -> None:
    for version in range(running.loop.version, until_version):
        first, *others = (f"{BATCH * version + n}.1" for n in range(BATCH))
        rewards = (1.0, math.nan)  # its grader abstained from one
        completions = tuple(make_completion(3, version=version, reward=reward) for reward in rewards)
        await hub.give(
            running.delivered(first, completions=completions),
            *(running.delivered(name, version=version) for name in others),
        )
        await hub.wait_until(lambda: running.loop.version > version)  # noqa: B023 - awaited at once
        await until(lambda: (version + 1, BATCH) in running.written)  # noqa: B023


@dataclass(frozen=True)
class Killed:
    """A learner that was killed two steps after its checkpoint of version 4; the second was published."""

    directory: Path
    head: PolicyVersion
    parameters: torch.Tensor

    def copy(self, to: Path) -> Path:
        return Path(shutil.copytree(self.directory, to))


async def train_and_be_killed(model_dir: Path, directory: Path, *, device: str = "cpu") -> Killed:
    """Train to version 6; leave what a kill would have left."""
    async with (
        scripted_hub() as hub,
        learner(hub, model_dir, directory / "a", checkpoint_every_versions=4, device=device) as running,
    ):
        await take_steps(hub, running, until_version=6)
        await until(lambda: versions_in(directory / "a" / "checkpoints") == [4])
        shutil.copytree(directory / "a", directory / "b")
        return Killed(directory / "b", head_of(running), parameters(running.policy).cpu())


@pytest.fixture(scope="module")
def killed(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    return asyncio.run(train_and_be_killed(model_dir, tmp_path_factory.mktemp("killed")))


async def test_a_killed_learner_goes_on_bit_for_bit_whatever_its_settings_are_by_then(
    model_dir: Path, tmp_path: Path, killed: Killed
) -> None:
    changed: dict[str, Any] = {"learning_rate": 5e-3, "gradient_clip_norm": 1e-3, "objective": "grpo"}
    state, head = killed.copy(tmp_path / "changed"), killed.head
    async with scripted_hub() as hub, learner(hub, model_dir, state, head=head, **changed) as again:
        restart = again.state.restart
        assert (restart.checkpoint_version, restart.version, restart.outcome) == (4, 6, "exact")
    state = killed.copy(tmp_path / "as before")
    async with scripted_hub() as hub, learner(hub, model_dir, state, head=head) as again:
        assert (again.state.restart.outcome, again.state.restart.changed) == ("exact", ())
        assert again.loop.version == 6
        assert torch.equal(parameters(again.policy), killed.parameters)
        await take_steps(hub, again, until_version=7)
        assert hub.hellos[0].version == 6
        # The records that nobody had acknowledged are said again, and then the next one.
        assert [record.version for record in hub.records][-1] == 7
        assert Counter(hub.trained_group_ids).most_common(1)[0][1] == 1


@pytest.mark.gpu
async def test_a_learner_on_a_gpu_that_was_killed_goes_on_from_its_journal(
    model_dir: Path, tmp_path: Path
) -> None:
    """A GPU may not add up twice alike: then the replay says so, and comes near."""
    killed = await train_and_be_killed(model_dir, tmp_path, device=DEVICE)
    before, state = killed.parameters, killed.directory
    async with scripted_hub() as hub:
        async with learner(hub, model_dir, state, head=killed.head, device=DEVICE) as again:
            restart, after = again.state.restart, parameters(again.policy).cpu()
            assert (restart.checkpoint_version, restart.version, restart.changed) == (4, 6, ())
            assert restart.outcome == ("exact" if torch.equal(after, before) else "inexact")
            torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4)
            await take_steps(hub, again, until_version=7)
            assert again.policy.is_finite()
            head, before = head_of(again), parameters(again.policy).cpu()
        # It ended with a checkpoint, which is exact wherever it was made.
        async with learner(hub, model_dir, state, head=head, device=DEVICE) as again:
            restart = again.state.restart
            assert (restart.version, restart.replayed_steps, restart.outcome) == (7, 0, "exact")
            assert torch.equal(parameters(again.policy).cpu(), before)
        async with learner(hub, model_dir, state, head=head) as again:
            assert torch.equal(parameters(again.policy), before)


async def test_a_replay_that_makes_other_words_goes_on_and_leaves_no_checkpoint_of_the_published_number(
    model_dir: Path, tmp_path: Path, killed: Killed
) -> None:
    state, head = killed.copy(tmp_path / "state"), killed.head
    disturb_moments(state / "checkpoints" / "000000000004")
    async with scripted_hub() as hub:
        async with learner(hub, model_dir, state, head=head) as again:
            assert (again.state.restart.outcome, again.loop.version) == ("inexact", 6)
            assert not torch.equal(parameters(again.policy), killed.parameters)
        assert versions_in(state / "checkpoints") == [4]
        async with learner(hub, model_dir, state, head=head) as again:
            assert again.state.restart.outcome == "inexact"
            await take_steps(hub, again, until_version=7)
            words = parameters(again.policy)
        assert versions_in(state / "checkpoints") == [4, 7]
        async with learner(hub, model_dir, state, head=head) as again:
            assert (again.state.restart.outcome, again.loop.version) == ("unpublished", 7)
            assert torch.equal(parameters(again.policy), words)


async def test_a_damaged_checkpoint_can_be_removed_and_the_journal_leads_to_the_same_version(
    model_dir: Path, tmp_path: Path, killed: Killed
) -> None:
    state, head = killed.copy(tmp_path / "state"), killed.head
    checkpoint = state / "checkpoints" / "000000000004"
    [file] = (checkpoint / "optimizer").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    async with scripted_hub() as hub:
        with pytest.raises(StartupError, match="cut short or changed"):
            async with learner(hub, model_dir, state, head=head):
                pass
        shutil.rmtree(checkpoint)
        async with learner(hub, model_dir, state, head=head) as again:
            assert (again.state.restart.replayed_steps, again.state.restart.outcome) == (6, "exact")


async def test_the_journal_is_cut_behind_the_older_of_two_checkpoints(
    model_dir: Path, tmp_path: Path
) -> None:
    async with (
        scripted_hub() as hub,
        learner(hub, model_dir, tmp_path, checkpoint_every_versions=2) as running,
    ):
        for version in (2, 4, 6):
            await take_steps(hub, running, until_version=version)
            await until(lambda: versions_in(tmp_path / "checkpoints")[-1:] == [version])  # noqa: B023
        await take_steps(hub, running, until_version=7)
        assert versions_in(tmp_path / "checkpoints") == [4, 6]

        def entries() -> list[tuple[int, int]]:
            with closing(sqlite3.connect(tmp_path / FILE)) as connection:
                return list(connection.execute("SELECT number, bytes FROM entries"))

        # A step is told before the journal is cut and measured.
        await until(lambda: [number for number, _ in entries()] == [5, 6, 7])
        await until(lambda: running.shown("journal_bytes") == sum(size for _, size in entries()))
        assert running.shown("checkpoint_version") == 6


async def test_versions_to_keep_have_checkpoints_even_where_steps_are_faster(
    model_dir: Path, tmp_path: Path
) -> None:
    async with (
        scripted_hub() as hub,
        learner(hub, model_dir, tmp_path, keep_every_versions=2) as running,
    ):
        await take_steps(hub, running, until_version=7)
        running.stopping.set()
        await asyncio.wait_for(asyncio.gather(*running.tasks), timeout=30)
    assert versions_in(tmp_path / "checkpoints") == [2, 4, 6, 7]
