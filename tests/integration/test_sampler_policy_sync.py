"""A sampler's policy sync against a real hub: the newest signed version is served, or none that is not."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from heterorl.v1 import policy_pb2
from node.errors import Reason, RefusedError
from node.values.groups.rollout import LeaseGrant
from sampler.versions import policy_sync
from sampler.versions.saved_policy import BASE_FILE, HELD_FILE, LOG_DIRECTORY
from support.identity import MadeRun
from support.policy_hub import Answers, PolicyHub, policy_hub, policy_hub_fixture
from support.policy_sync import both_ways, syncing
from support.waiting import until
from support.weights import LAYOUT, flip_bit, random_words

hub = policy_hub_fixture()


async def test_the_base_model_is_served_until_a_version_is_announced(hub: PolicyHub, state_dir: Path) -> None:
    async with syncing(hub, state_dir) as serving:
        await serving.reaches(hub.learner.versions[0])
        await asyncio.to_thread(hub.learner.put, hub.store, (1, 0))
        await serving.reaches(hub.learner.versions[1])
        assert serving.numbers == [0, 1]


@both_ways
async def test_every_version_on_the_way_is_verified_and_served(hub: PolicyHub, state_dir: Path) -> None:
    hub.learner.put(hub.store, (1, 0), (2, 1), (3, 2))
    async with syncing(hub, state_dir) as serving:
        await serving.reaches(hub.learner.versions[3])
        assert serving.numbers == [0, 1, 2, 3]
        for number in serving.numbers:
            np.testing.assert_array_equal(serving.words[number], hub.learner.versions[number].words)


@both_ways
async def test_while_the_engine_is_busy_newer_versions_replace_older_ones(
    hub: PolicyHub, state_dir: Path
) -> None:
    async with syncing(hub, state_dir) as serving:
        await serving.reaches(hub.learner.versions[0])
        serving.is_taking.clear()
        offers = serving.offers
        await asyncio.to_thread(hub.learner.put, hub.store, (1, 0))
        await until(lambda: serving.offers > offers)
        await asyncio.to_thread(hub.learner.put, hub.store, (2, 1), (3, 2), (9, None))
        await until(lambda: (told := serving.sync._announcement) is not None and told.head.number == 9)
        serving.is_taking.set()
        await serving.reaches(hub.learner.versions[9])
        assert serving.numbers == [0, 1, 9]


async def test_at_the_version_that_is_evaluated_a_sampler_stays_and_then_goes_on(
    hub: PolicyHub, state_dir: Path
) -> None:
    hub.learner.put(hub.store, (1, 0), (2, 1), (3, 2), (3, 0))
    async with syncing(hub, state_dir) as serving:
        serving.policy.stop_from = 2
        serving.generating.add(2)
        await serving.reaches(hub.learner.versions[2])
        await asyncio.to_thread(hub.learner.put, hub.store, (4, 3))
        serving.spoil(1)
        serving.sync.doubt()  # taking it from the disk again does not wait
        await until(lambda: serving.numbers.count(2) == 2)
        assert 3 not in serving.numbers
        serving.generating.clear()
        serving.policy.answered(2, LeaseGrant((), 0.0, "", 10), had_to_ask=True, now=0.0)
        await serving.reaches(hub.learner.versions[4])


async def test_a_hub_that_only_sends_damage_is_never_believed_and_can_recover(
    hub: PolicyHub, state_dir: Path
) -> None:
    async def spoilt(number: int, answers: Answers) -> Answers:
        async for answer in answers:
            answer.data = bytes(len(answer.data))
            yield answer

    hub.learner.put(hub.store, (1, 0))
    good, hub.servicer.spoil = hub.servicer.spoil, spoilt
    async with syncing(hub, state_dir) as serving:
        await until(lambda: serving.refusals[Reason.DAMAGED] > 0)
        assert serving.numbers == [0]
        hub.servicer.spoil = good
        await serving.reaches(hub.learner.versions[1])


def _other_size(said: policy_pb2.WatchVersionsResponse) -> None:
    said.artifacts[0].size_bytes = 1


def _other_root(said: policy_pb2.WatchVersionsResponse) -> None:
    said.head.root = b"r" * 16


def _future_version(said: policy_pb2.WatchVersionsResponse) -> None:
    said.head.number = 1_000_000
    said.artifacts.add(key=policy_pb2.ArtifactKey(version=1_000_000, base_version=0))


@pytest.mark.parametrize("lie", [_other_size, _other_root, _future_version])
async def test_a_source_that_announces_what_was_never_signed_keeps_nobody_from_the_head(
    hub: PolicyHub,
    made: MadeRun,
    tmp_path: Path,
    state_dir: Path,
    lie: Callable[[policy_pb2.WatchVersionsResponse], None],
) -> None:
    async with policy_hub(made, tmp_path / "liar", learner=hub.learner) as liar:
        hub.learner.put(hub.store, (1, 0), (2, 1), (3, 2))
        hub.learner.put(liar.store, (1, 0), (2, 1), (3, 2))
        liar.servicer.announced_instead = lie
        async with syncing(hub, state_dir, others=(liar,)) as serving:
            await serving.reaches(hub.learner.versions[3])
            if lie is not _future_version:
                faults = serving.registry.value("heterorl_node_source_faults_total", fault="lied")
                assert faults == 1


async def test_a_sampler_whose_base_model_is_not_the_runs_ends_and_says_so(
    hub: PolicyHub, state_dir: Path
) -> None:
    hub.learner.put(hub.store, (1, 0), (1, None))
    with pytest.RaisesGroup(
        pytest.RaisesExc(RefusedError, match="^your model_dir is not the run's base: its version 0 has root"),
        flatten_subgroups=True,
    ):
        async with syncing(hub, state_dir, words0=random_words(99)):
            await asyncio.sleep(30)


async def test_it_follows_the_hub_through_a_restart(
    hub: PolicyHub, made: MadeRun, tmp_path: Path, state_dir: Path
) -> None:
    hub.learner.put(hub.store, (1, 0))
    async with syncing(hub, state_dir) as serving:
        await serving.reaches(hub.learner.versions[1])
        hub.serving.stopping.set()
        await hub.serving.running
        listen = hub.serving.address
        async with policy_hub(made, tmp_path / "hub", learner=hub.learner, listen=listen) as again:
            await asyncio.to_thread(again.learner.put, again.store, (2, 1))
            await serving.reaches(again.learner.versions[2])


async def test_a_hub_rolled_back_behind_what_was_verified_is_refused(
    hub: PolicyHub, made: MadeRun, tmp_path: Path, state_dir: Path
) -> None:
    hub.learner.put(hub.store, (1, 0), (2, 1))
    async with syncing(hub, state_dir) as serving:
        await serving.reaches(hub.learner.versions[2])
        await copied(state_dir)
    (state_dir / HELD_FILE).unlink()
    async with policy_hub(made, tmp_path / "old", learner=hub.learner) as rolled_back:
        rolled_back.learner.put(rolled_back.store, (1, 0))
        async with syncing(rolled_back, state_dir) as serving:
            await until(lambda: serving.refusals[Reason.ROLLBACK] == 1)
            assert serving.numbers == [0]


async def copied(state_dir: Path) -> None:
    """Wait until what is held is in the copy and no longer in the log."""
    await until(lambda: not any((state_dir / LOG_DIRECTORY).iterdir()))


async def test_doubt_about_words_that_are_right_fetches_no_frame(hub: PolicyHub, state_dir: Path) -> None:
    hub.learner.put(hub.store, (1, 0), (2, 1))
    async with syncing(hub, state_dir) as serving:
        await serving.reaches(hub.learner.versions[2])
        serving.versions.clear()
        hub.servicer.fetches.clear()
        serving.sync.doubt()
        await serving.reaches(hub.learner.versions[2])
        assert serving.numbers == [2]
        assert hub.servicer.fetches == []


@both_ways
@pytest.mark.parametrize(
    ("noticed_by", "save_every_s"),
    [("the scrub", 0.0), ("a doubt", 3600.0)],
    ids=["by the scrub, from a copy", "by a doubt, from the log"],
)
async def test_a_frame_that_went_bad_in_memory_is_taken_from_the_disk_again(
    hub: PolicyHub,
    state_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    noticed_by: str,
    save_every_s: float,
) -> None:
    monkeypatch.setattr(policy_sync, "SCRUB_EVERY_S", 0.05 if noticed_by == "the scrub" else 3600.0)
    hub.learner.put(hub.store, (1, 0), (2, 1))
    async with syncing(hub, state_dir, save_every_s=save_every_s) as serving:
        await serving.reaches(hub.learner.versions[2])
        if not save_every_s:
            await copied(state_dir)
        hub.servicer.fetches.clear()
        serving.spoil(3)
        if noticed_by == "a doubt":
            serving.sync.doubt()
        await until(lambda: len(serving.versions) > len(set(serving.numbers)))
        np.testing.assert_array_equal(serving.words[2], hub.learner.words(2))
        assert hub.servicer.fetches == []
        await until(lambda: serving.registry.value("heterorl_node_frames_mended_total") == 1)


@both_ways
async def test_a_frame_that_went_bad_in_memory_is_found_by_the_next_delta_which_is_not_fetched_twice(
    hub: PolicyHub, state_dir: Path
) -> None:
    hub.learner.put(hub.store, (1, 0), (2, 1))
    async with syncing(hub, state_dir, save_every_s=3600.0) as serving:
        await serving.reaches(hub.learner.versions[2])
        serving.spoil(3)
        await asyncio.to_thread(hub.learner.put, hub.store, (3, 2))
        await serving.reaches(hub.learner.versions[3])
        assert serving.registry.value("heterorl_node_frames_mended_total") == 1
        sizes = [
            len(payload) for base in (0, 1, 2) for payload in hub.learner.encode(base + 1, base).payloads
        ]
        assert serving.registry.transferred("delta", "in") == sum(sizes)


@both_ways
async def test_a_damaged_version_that_the_disk_lacks_is_fetched_and_nothing_older_is_sampled_from(
    hub: PolicyHub, state_dir: Path
) -> None:
    hub.learner.put(hub.store, (1, 0), (2, 1))
    async with syncing(hub, state_dir) as serving:
        await serving.reaches(hub.learner.versions[2])
        await copied(state_dir)
        flip_bit(state_dir / HELD_FILE, 3000)
        serving.spoil(*range(len(LAYOUT.frames)))
        serving.sync.doubt()
        await until(lambda: len(serving.versions) > len(set(serving.numbers)))
        assert serving.numbers[-2:] == [2, 2]
        np.testing.assert_array_equal(serving.words[2], hub.learner.words(2))


async def test_a_damaged_version_whose_base_rotted_on_the_disk_too_ends_the_sampler(
    hub: PolicyHub, state_dir: Path
) -> None:
    with pytest.RaisesGroup(
        pytest.RaisesExc(RefusedError, match="is not as it was verified"), flatten_subgroups=True
    ):
        async with syncing(hub, state_dir) as serving:
            await serving.reaches(hub.learner.versions[0])
            flip_bit(state_dir / BASE_FILE, 3000)
            serving.spoil(1)
            serving.sync.doubt()
            await asyncio.sleep(30)
