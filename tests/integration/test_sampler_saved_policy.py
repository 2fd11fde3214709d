"""A sampler continues from its policy on disk after a kill, damage or a full disk."""

import asyncio
import errno
import os
from pathlib import Path

import numpy as np
import pytest

from node.errors import Reason, StartupError
from sampler.versions.saved_policy import HELD_FILE, LOG_DIRECTORY, MARK_FILE
from support.policy_hub import Answers, PolicyHub, policy_hub_fixture
from support.policy_sync import IN_PLACE, both_ways, syncing
from support.waiting import until
from support.weights import flip_bit, offsets

hub = policy_hub_fixture()


async def test_a_restarted_sampler_goes_on_from_its_copy(hub: PolicyHub, state_dir: Path) -> None:
    hub.learner.put(hub.store, (1, 0), (2, 1))
    async with syncing(hub, state_dir) as serving:
        await serving.reaches(hub.learner.versions[2])
    hub.learner.put(hub.store, (3, 2))
    hub.servicer.fetches.clear()
    async with syncing(hub, state_dir) as serving:
        await serving.reaches(hub.learner.versions[3])
        assert serving.numbers == [2, 3]
        assert {fetch.key.version for fetch in hub.servicer.fetches} == {3}


@both_ways
async def test_between_two_copies_a_restarted_sampler_goes_on_from_its_log(
    hub: PolicyHub, state_dir: Path
) -> None:
    hub.learner.put(hub.store, (1, 0), (2, 1))
    async with syncing(hub, state_dir, save_every_s=3600) as serving:
        await serving.reaches(hub.learner.versions[2])
        assert not (state_dir / HELD_FILE).exists()
    hub.servicer.fetches.clear()
    async with syncing(hub, state_dir, save_every_s=3600) as serving:
        await serving.reaches(hub.learner.versions[2])
        assert serving.numbers == [2]
        assert hub.servicer.fetches == []


async def test_a_damaged_copy_is_fetched_anew(hub: PolicyHub, state_dir: Path) -> None:
    hub.learner.put(hub.store, (1, 0))
    async with syncing(hub, state_dir) as serving:
        await serving.reaches(hub.learner.versions[1])
        await until((state_dir / HELD_FILE).exists)
    flip_bit(state_dir / HELD_FILE, 3000)
    async with syncing(hub, state_dir) as serving:
        await serving.reaches(hub.learner.versions[1])
        assert serving.numbers == [0, 1]


async def test_a_sampler_killed_in_mid_fetch_goes_on_with_the_frames_it_had(
    hub: PolicyHub, state_dir: Path
) -> None:
    sent: list[int] = []

    async def stuck(number: int, answers: Answers) -> Answers:
        async for answer in answers:
            if len(sent) == 3:
                await asyncio.Event().wait()
            sent.append(len(answer.data))
            yield answer

    hub.learner.put(hub.store, (1, None))
    good, hub.servicer.spoil = hub.servicer.spoil, stuck
    async with syncing(hub, state_dir) as serving:
        await until(lambda: len(sent) == 3 and serving.registry.transferred("keyframe", "in") == sum(sent))
    hub.servicer.spoil = good
    async with syncing(hub, state_dir) as serving:
        await serving.reaches(hub.learner.versions[1])
        # The last of them may not have been on disk yet.
        again = serving.registry.transferred("keyframe", "in")
        whole = sum(map(len, hub.learner.encode(1, None).payloads))
        assert again <= whole - sum(sent) + max(sent)


@both_ways
async def test_a_payload_that_rots_in_the_log_is_fetched_again_and_a_logged_version_is_not_believed(
    hub: PolicyHub, state_dir: Path
) -> None:
    hub.learner.put(hub.store, (1, 0), (2, 1))
    async with syncing(hub, state_dir, save_every_s=3600) as serving:
        await serving.reaches(hub.learner.versions[2])
    flip_bit(state_dir / LOG_DIRECTORY / "2-1" / "frames", 5)
    hub.servicer.fetches.clear()
    async with syncing(hub, state_dir, save_every_s=3600) as serving:
        await serving.reaches(hub.learner.versions[2])
        assert serving.numbers == [1, 2]
        assert [list(fetch.frames) for fetch in hub.servicer.fetches] == [[0]]


@both_ways
async def test_an_older_version_on_the_way_to_a_newer_one_takes_no_place_on_disk(
    hub: PolicyHub, state_dir: Path
) -> None:
    async def stuck_at_4(number: int, answers: Answers) -> Answers:
        if hub.servicer.fetches[-1].key.version == 4:
            await asyncio.Event().wait()
        async for answer in answers:
            yield answer

    hub.learner.put(hub.store, (1, 0), (2, 1))
    async with syncing(hub, state_dir) as serving:
        await serving.reaches(hub.learner.versions[2])
    hub.learner.put(hub.store, (4, 1))
    good, hub.servicer.spoil = hub.servicer.spoil, stuck_at_4
    async with syncing(hub, state_dir) as serving:
        # By version 1, from the public base model: nothing leads on from version 2.
        await until(lambda: any(fetch.key.version == 4 for fetch in hub.servicer.fetches))
        assert serving.numbers == [2]
    hub.servicer.spoil = good
    async with syncing(hub, state_dir) as serving:
        await serving.reaches(hub.learner.versions[4])
        assert serving.numbers == [2, 4]


@both_ways
async def test_a_full_disk_costs_the_log_and_not_the_version(
    hub: PolicyHub, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    hub.learner.put(hub.store, (1, 0))
    async with syncing(hub, state_dir, save_every_s=3600) as serving:
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", full)
            await serving.reaches(hub.learner.versions[1])
        assert serving.refusals[Reason.DISK] >= 1
        await asyncio.to_thread(hub.learner.put, hub.store, (2, 1))
        await serving.reaches(hub.learner.versions[2])
    async with syncing(hub, state_dir, save_every_s=3600) as serving:
        await serving.reaches(hub.learner.versions[2])


@pytest.mark.parametrize("state_dir", [IN_PLACE], indirect=True)
async def test_a_version_half_applied_is_never_served_and_the_one_on_disk_is(
    hub: PolicyHub, state_dir: Path
) -> None:
    hub.learner.put(hub.store, (1, 0))
    async with syncing(hub, state_dir, save_every_s=3600) as serving:
        await serving.reaches(hub.learner.versions[1])
        serving.is_taking.clear()
        await asyncio.to_thread(hub.learner.put, hub.store, (2, 1))
        await until(lambda: serving.offers == 3)
        # Verified, and on disk: its third frame rots before it is read again, after two were written.
        payloads = state_dir / LOG_DIRECTORY / "2-1" / "frames"
        flip_bit(payloads, offsets(hub.learner.encode(2, 1).payloads)[2])
        hub.servicer.fetches.clear()
        serving.is_taking.set()
        await serving.reaches(hub.learner.versions[2])
        assert serving.numbers == [0, 1, 1, 2]
        np.testing.assert_array_equal(serving.words[1], hub.learner.words(1))
        assert serving.refusals[Reason.DAMAGED] == 1
        assert [list(fetch.frames) for fetch in hub.servicer.fetches] == [[2]]


async def test_a_damaged_high_water_mark_is_not_ignored(hub: PolicyHub, state_dir: Path) -> None:
    (state_dir / MARK_FILE).write_text("{")
    with pytest.RaisesGroup(StartupError, flatten_subgroups=True):
        async with syncing(hub, state_dir):
            pass
