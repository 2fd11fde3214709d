"""A sampler's policy sync against a real hub: the newest signed version is served, or none that is not."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from node.clock import SystemClock
from node.errors import Reason, StartupError
from node.policy import PolicyVersion
from node.relay.policy_servicer import damage_first
from node.rpc.channel import Purpose
from node.weights.digests import Words
from node.weights.held import HeldPolicy
from node.weights.watch import watch_versions
from sampler.policy_sync import HELD_FILE, MARK_FILE, PolicySync
from support.identity import MadeRun, make_run
from support.policy_hub import Answers, PolicyHub, Registry, policy_hub
from support.waiting import until
from support.weights import LAYOUT, Learner, flip_bit, random_words


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return make_run(tmp_path, now=time.time())


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "sampler"
    directory.mkdir()
    return directory


class Serving:
    """What an engine was given: versions in order, with copies of their words as they were then."""

    def __init__(self) -> None:
        self.versions: list[PolicyVersion] = []
        self.words: dict[int, Words] = {}
        self.is_taking = asyncio.Event()
        self.is_taking.set()
        self.refusals: Counter[Reason] = Counter()
        self.sync: PolicySync

    async def hand_over(self, policy: HeldPolicy) -> None:
        await self.is_taking.wait()
        self.versions.append(policy.version)
        self.words[policy.version.number] = policy.words.copy()

    def count_refusal(self, *, service: str, reason: Reason) -> None:
        self.refusals[reason] += 1

    @property
    def numbers(self) -> list[int]:
        return [version.number for version in self.versions]

    async def reaches(self, version: HeldPolicy) -> None:
        await until(lambda: bool(self.versions) and self.versions[-1] == version.version)
        np.testing.assert_array_equal(self.words[version.version.number], version.words)


@asynccontextmanager
async def syncing(
    hub: PolicyHub, state_dir: Path, *, words0: Words | None = None, save_every_s: float = 0.0
) -> AsyncIterator[Serving]:
    """Run a policy sync beside the body; where it fails, the body ends with it."""
    serving, registry = Serving(), Registry()
    control = await hub.dial(hub.made.sampler, purpose=Purpose.CONTROL)
    base = hub.learner.versions[0].words if words0 is None else words0
    serving.sync = PolicySync(
        await hub.fetcher(registry, attempts=2),
        watch=lambda: watch_versions(control, random=lambda: 0.01),
        layout=hub.learner.layout,
        words0=base.copy,
        hand_over=serving.hand_over,
        state_dir=state_dir,
        save_every_s=save_every_s,
        transfer_metrics=registry.metrics,
        count_refusal=serving.count_refusal,
        clock=SystemClock(),
        random=random.random,
    )
    ready, stopping = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serving.sync.run(ready=ready.set, stopping=stopping))
        await ready.wait()
        yield serving
        stopping.set()


async def test_the_base_model_is_served_until_a_version_is_announced(
    made: MadeRun, tmp_path: Path, state_dir: Path
) -> None:
    async with policy_hub(made, tmp_path / "hub") as hub, syncing(hub, state_dir) as serving:
        await serving.reaches(hub.learner.versions[0])
        await asyncio.to_thread(hub.learner.put, hub.store, (1, 0))
        await serving.reaches(hub.learner.versions[1])
        assert serving.numbers == [0, 1]


async def test_every_version_on_the_way_is_verified_and_served(
    made: MadeRun, tmp_path: Path, state_dir: Path
) -> None:
    async with policy_hub(made, tmp_path / "hub") as hub:
        hub.learner.put(hub.store, (1, 0), (2, 1), (3, 2))
        async with syncing(hub, state_dir) as serving:
            await serving.reaches(hub.learner.versions[3])
            assert serving.numbers == [0, 1, 2, 3]
            for number in serving.numbers:
                np.testing.assert_array_equal(serving.words[number], hub.learner.versions[number].words)


async def test_while_the_engine_is_busy_newer_versions_replace_older_ones(
    made: MadeRun, tmp_path: Path, state_dir: Path
) -> None:
    async with policy_hub(made, tmp_path / "hub") as hub, syncing(hub, state_dir) as serving:
        await serving.reaches(hub.learner.versions[0])
        serving.is_taking.clear()
        await asyncio.to_thread(hub.learner.put, hub.store, (1, 0))
        await until(lambda: len(hub.servicer.fetches) > 0)
        await asyncio.to_thread(hub.learner.put, hub.store, (2, 1), (3, 2), (9, None))
        serving.is_taking.set()
        await serving.reaches(hub.learner.versions[9])
        assert serving.numbers == [0, 1, 9]


async def test_a_fetch_that_became_needless_is_dropped(
    made: MadeRun, tmp_path: Path, state_dir: Path
) -> None:
    async def stuck(number: int, answers: Answers) -> Answers:
        async for answer in answers:
            if hub.servicer.fetches[number - 1].key.version == 1:
                await asyncio.Event().wait()
            yield answer

    async with policy_hub(made, tmp_path / "hub") as hub:
        hub.servicer.spoil = stuck
        async with syncing(hub, state_dir) as serving:
            await asyncio.to_thread(hub.learner.put, hub.store, (1, 0))
            await until(lambda: len(hub.servicer.fetches) > 0)
            await asyncio.to_thread(hub.learner.put, hub.store, (9, None))
            await serving.reaches(hub.learner.versions[9])
            assert serving.numbers == [0, 9]


async def test_damaged_frames_are_fetched_again_and_never_served(
    made: MadeRun, tmp_path: Path, state_dir: Path
) -> None:
    async with policy_hub(made, tmp_path / "hub", damage=damage_first(2)) as hub:
        hub.learner.put(hub.store, (1, 0))
        async with syncing(hub, state_dir) as serving:
            await serving.reaches(hub.learner.versions[1])


async def test_a_hub_that_only_sends_damage_is_never_believed_and_can_recover(
    made: MadeRun, tmp_path: Path, state_dir: Path
) -> None:
    async def spoilt(number: int, answers: Answers) -> Answers:
        async for answer in answers:
            answer.data = bytes(len(answer.data))
            yield answer

    async with policy_hub(made, tmp_path / "hub") as hub:
        hub.learner.put(hub.store, (1, 0))
        hub.servicer.spoil = spoilt
        async with syncing(hub, state_dir) as serving:
            await until(lambda: serving.refusals[Reason.DAMAGED] > 0)
            assert serving.numbers == [0]
            hub.servicer.spoil = lambda number, answers: answers
            await serving.reaches(hub.learner.versions[1])


async def test_a_base_model_that_is_not_the_runs_is_replaced_by_a_keyframe(
    made: MadeRun, tmp_path: Path, state_dir: Path
) -> None:
    async with policy_hub(made, tmp_path / "hub") as hub:
        hub.learner.put(hub.store, (1, 0), (1, None))
        async with syncing(hub, state_dir, words0=random_words(99)) as serving:
            await serving.reaches(hub.learner.versions[1])
            assert serving.refusals[Reason.WRONG_BASE] == 1


async def test_it_follows_the_hub_through_a_restart(made: MadeRun, tmp_path: Path, state_dir: Path) -> None:
    async with policy_hub(made, tmp_path / "hub") as first:
        first.learner.put(first.store, (1, 0))
        listen = first.serving.address
        async with syncing(first, state_dir) as serving:
            await serving.reaches(first.learner.versions[1])
            first.serving.stopping.set()
            await first.serving.running
            async with policy_hub(made, tmp_path / "hub", learner=first.learner, listen=listen) as second:
                await asyncio.to_thread(second.learner.put, second.store, (2, 1))
                await serving.reaches(second.learner.versions[2])


async def test_a_restarted_sampler_goes_on_from_its_copy(
    made: MadeRun, tmp_path: Path, state_dir: Path
) -> None:
    async with policy_hub(made, tmp_path / "hub") as hub:
        hub.learner.put(hub.store, (1, 0), (2, 1))
        async with syncing(hub, state_dir) as serving:
            await serving.reaches(hub.learner.versions[2])
        hub.learner.put(hub.store, (3, 2))
        hub.servicer.fetches.clear()
        async with syncing(hub, state_dir) as serving:
            await serving.reaches(hub.learner.versions[3])
            assert serving.numbers == [2, 3]
            assert {fetch.key.version for fetch in hub.servicer.fetches} == {3}


async def test_a_copy_is_left_when_stopping_however_rarely_it_is_saved(
    made: MadeRun, tmp_path: Path, state_dir: Path
) -> None:
    async with policy_hub(made, tmp_path / "hub") as hub:
        hub.learner.put(hub.store, (1, 0))
        async with syncing(hub, state_dir, save_every_s=3600) as serving:
            await serving.reaches(hub.learner.versions[1])
            assert not (state_dir / HELD_FILE).exists()
        async with syncing(hub, state_dir) as serving:
            await serving.reaches(hub.learner.versions[1])
            assert serving.numbers == [1]


async def test_a_damaged_copy_is_fetched_anew(made: MadeRun, tmp_path: Path, state_dir: Path) -> None:
    async with policy_hub(made, tmp_path / "hub") as hub:
        hub.learner.put(hub.store, (1, 0))
        async with syncing(hub, state_dir) as serving:
            await serving.reaches(hub.learner.versions[1])
        flip_bit(state_dir / HELD_FILE, 3000)
        async with syncing(hub, state_dir) as serving:
            await serving.reaches(hub.learner.versions[1])
            assert serving.numbers == [0, 1]


async def test_a_hub_rolled_back_behind_what_was_verified_is_refused(
    made: MadeRun, tmp_path: Path, state_dir: Path
) -> None:
    async with policy_hub(made, tmp_path / "new") as hub:
        hub.learner.put(hub.store, (1, 0), (2, 1))
        async with syncing(hub, state_dir) as serving:
            await serving.reaches(hub.learner.versions[2])
    (state_dir / HELD_FILE).unlink()
    async with policy_hub(made, tmp_path / "old", learner=hub.learner) as rolled_back:
        rolled_back.learner.put(rolled_back.store, (1, 0))
        async with syncing(rolled_back, state_dir) as serving:
            await until(lambda: serving.refusals[Reason.ROLLBACK] == 1)
            assert serving.numbers == [0]


async def test_a_second_learner_with_an_older_epoch_is_refused(
    made: MadeRun, tmp_path: Path, state_dir: Path
) -> None:
    async with policy_hub(made, tmp_path / "new") as hub:
        hub.learner.epoch = 2
        hub.learner.put(hub.store, (1, 0))
        async with syncing(hub, state_dir) as serving:
            await serving.reaches(hub.learner.versions[1])
    older = Learner(layout=LAYOUT, run_id=made.run_id, key=made.signing_key, epoch=1)
    async with policy_hub(made, tmp_path / "old", learner=older) as second:
        second.learner.put(second.store, (2, 0))
        async with syncing(second, state_dir) as serving:
            await until(lambda: serving.refusals[Reason.FENCED] == 1)
            assert serving.numbers == [1]


async def test_doubt_begins_again_from_the_base_and_ends_at_the_same_version(
    made: MadeRun, tmp_path: Path, state_dir: Path
) -> None:
    async with policy_hub(made, tmp_path / "hub") as hub:
        hub.learner.put(hub.store, (1, 0), (2, 1))
        async with syncing(hub, state_dir) as serving:
            await serving.reaches(hub.learner.versions[2])
            serving.versions.clear()
            hub.servicer.fetches.clear()
            serving.sync.doubt()
            await serving.reaches(hub.learner.versions[2])
            # What is older than the version served before is not handed to the engine again.
            assert serving.numbers == [2]
            assert {fetch.key.version for fetch in hub.servicer.fetches} == {1, 2}


async def test_a_damaged_high_water_mark_is_not_ignored(
    made: MadeRun, tmp_path: Path, state_dir: Path
) -> None:
    (state_dir / MARK_FILE).write_text("{")
    async with policy_hub(made, tmp_path / "hub") as hub:
        with pytest.raises(ExceptionGroup) as caught:
            async with syncing(hub, state_dir):
                pass
        assert caught.value.subgroup(StartupError) is not None
