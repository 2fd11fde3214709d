"""The publisher with a real store: what a peer that fetches everything would end up with."""

import asyncio
from pathlib import Path
from unittest import mock

import pytest
import torch

from bench.held_policy import HeldPolicy
from bench.whole_versions import encode_version
from learner.masters.master_words import MasterWords
from learner.publishing.further_artifacts import FurtherArtifacts
from learner.publishing.signer import Signer
from node.errors import Reason
from node.values.policy import ArtifactKey, PolicyVersion
from node.weights.assembly.stored import StoredVersions
from node.weights.format.digests import Words
from support.publishing import (
    FRAMED,
    KEY,
    LAYOUT,
    coder_of,
    fetched,
    held,
    open_store,
    publishing,
    slow_disk,
    words_of,
)
from support.refusals import cannot_start, refused
from support.waiting import until
from support.weights import put_words


async def test_every_version_it_has_time_for_becomes_a_delta_from_the_one_before(tmp_path: Path) -> None:
    async with publishing(tmp_path, start=held(0)) as running:
        for version in (1, 2, 5):
            await running.publish(version, running.head)
        assert running.keys == [ArtifactKey(1, 0), ArtifactKey(2, 1), ArtifactKey(5, 2)]
        assert (fetched(running.store, base=held(0), version=5).words == words_of(5)).all()


async def test_a_version_that_changes_no_word_is_not_published_before_its_number_would_cost_samplers(
    tmp_path: Path,
) -> None:
    """With a staleness bound of 8, numbers may run two ahead of the published version."""
    async with publishing(tmp_path, start=held(0), max_staleness_versions=8) as running:
        await running.publish(1, 0)
        for version in (2, 3):
            await running.step(version, words_of=1)
            await until(lambda: running.counted("unchanged_versions") == version - 1)  # noqa: B023
        assert running.keys == [ArtifactKey(1, 0)]
        await running.publish(4, 1, words_of=1)
        await running.publish(5, 4)
        assert (fetched(running.store, base=held(0), version=5).words == words_of(5)).all()


async def test_contributors_get_every_version_whatever_it_changes(tmp_path: Path) -> None:
    async with publishing(
        tmp_path, start=held(0), max_staleness_versions=8, leaves_out_unchanged=False
    ) as running:
        await running.publish(1, 0)
        await running.publish(2, 1, words_of=1)


async def test_a_rollback_to_the_words_that_are_published_is_published_since_older_groups_are_refused(
    tmp_path: Path,
) -> None:
    async with publishing(tmp_path, start=held(0), max_staleness_versions=40, oldest_usable=2) as running:
        await running.publish(1, 0)
        await running.publish(2, 1, words_of=1)
        await running.step(3, words_of=1)
        await until(lambda: running.counted("unchanged_versions") == 1)


async def test_the_last_version_is_published_whatever_it_changes_and_a_restart_goes_on_from_equal_words(
    tmp_path: Path,
) -> None:
    async with publishing(tmp_path, start=held(0), max_staleness_versions=8) as running:
        await running.publish(1, 0)
        await running.step(2, words_of=1)
        await running.stop()
        assert running.keys == [ArtifactKey(1, 0)]
    start = HeldPolicy.of(2, words_of(1), layout=LAYOUT)
    async with publishing(tmp_path, start=start, max_staleness_versions=8) as running:
        assert running.keys == [ArtifactKey(1, 0)]
        for _ in range(2):
            running.access.end()
            await running.stored(ArtifactKey(2, 1))
        await running.stop()
        assert running.keys == [ArtifactKey(1, 0), ArtifactKey(2, 1)]


async def test_a_version_the_next_step_was_faster_than_is_never_published(tmp_path: Path) -> None:
    async with publishing(tmp_path, start=held(0)) as running:
        with slow_disk(running.store) as disk:
            await running.step(1)
            await disk.reached()
            for version in (2, 3):
                await running.step(version)
            disk.goes_on.set()
        await running.stored(ArtifactKey(3, 1))
        assert running.keys == [ArtifactKey(1, 0), ArtifactKey(3, 1)]
        await running.publish(4, 3)
        assert running.counted("superseded_versions") == 1


async def test_a_keyframe_is_made_beside_the_delta_every_so_many_versions(tmp_path: Path) -> None:
    async with publishing(tmp_path, start=held(0), keyframe_every=3) as running:
        for version in (1, 2, 4, 5, 7):
            await running.publish(version, running.head)
        await running.stop()
        keyframes = [key for key in running.keys if key.is_keyframe]
        assert keyframes == [ArtifactKey(4), ArtifactKey(7)]
        assert running.keyframes == [4, 7]
        assert (fetched(running.store, base=None, version=7).words == words_of(7)).all()


async def test_two_arrays_of_words_do_however_many_versions_there_are(tmp_path: Path) -> None:
    arrays = {}
    read = MasterWords.read

    def watched(self: MasterWords, frame: int, words: Words) -> None:
        assert words.base is not None
        arrays[id(words.base)] = words.base  # Kept alive, or an address would come again.
        read(self, frame, words)

    with mock.patch.object(MasterWords, "read", watched):
        async with publishing(tmp_path, start=held(0), keyframe_every=3) as running:
            for version in range(1, 8):
                await running.publish(version, version - 1)
            await running.stop()
    assert len(arrays) == 2


@pytest.mark.parametrize("threads", [1, 3])
async def test_a_pass_shared_by_threads_makes_the_same_artifact_as_coding_the_whole(
    tmp_path: Path, threads: int
) -> None:
    async with publishing(tmp_path, start=held(0, FRAMED), layout=FRAMED, threads=threads) as running:
        await running.publish(9, 0)
        manifest = running.store.manifest(ArtifactKey(9, 0))
        whole = encode_version(
            words_of(9),
            version=9,
            base=held(0, FRAMED),
            layout=FRAMED,
            run_id="run",
            learner_epoch=1,
            published_at_s=manifest.published_at_s,
        )
        assert manifest == whole.manifest
        stored = tuple(
            running.store.read_payload(manifest.key, frame) if len(payload) else b""
            for frame, payload in enumerate(whole.payloads)
        )
        assert stored == whole.payloads


@pytest.mark.parametrize(
    ("published", "start", "hub_head", "keys"),
    [
        (1, held(1), None, [(1, 0), (4, 1)]),
        (1, held(3), held(1).version, [(1, 0), (3, 1), (4, 3)]),
        # An inexact replay: the published words of 1 stay, and the next version follows on them.
        (1, HeldPolicy.of(1, words_of(7), layout=LAYOUT), held(1).version, [(1, 0), (4, 1)]),
        (0, held(3), PolicyVersion(3, b"x" * 16), [(4,)]),
    ],
    ids=["at the published version", "ahead of it", "with other masters", "without its store"],
)
async def test_after_a_restart_the_next_version_follows_on_what_is_published(
    tmp_path: Path,
    published: int,
    start: HeldPolicy,
    hub_head: PolicyVersion | None,
    keys: list[tuple[int, ...]],
) -> None:
    async with publishing(tmp_path, start=held(0)) as running:
        if published:
            await running.step(published)
        await running.stop()
    async with publishing(tmp_path, start=start, hub_head=hub_head) as running:
        await running.step(4)
        await running.stop()
        assert running.keys == [ArtifactKey(*key) for key in keys]
        base = held(0) if published else None
        assert (fetched(running.store, base=base, version=4).words == words_of(4)).all()


@pytest.mark.parametrize("head", [held(4).version, PolicyVersion(3, b"x" * 16)])
async def test_a_learner_behind_the_run_or_on_another_branch_does_not_start(
    tmp_path: Path, head: PolicyVersion
) -> None:
    async with publishing(tmp_path, start=held(0)) as running:
        await running.step(3)
        await running.stop()
    async with publishing(tmp_path, start=held(3), hub_head=head) as running:
        with cannot_start(str(head.number)):
            await running.task
        assert running.keys == [ArtifactKey(3, 0)]


async def test_a_version_that_is_not_finite_ends_the_learner_and_is_not_published(tmp_path: Path) -> None:
    async with publishing(tmp_path, start=held(0, FRAMED), layout=FRAMED) as running:
        await asyncio.to_thread(running.access.begin_writing)
        running.masters["b"][1, 2] = torch.inf
        running.access.hold(1)
        with refused(Reason.NON_FINITE, "'b'", "9"):
            await asyncio.wait_for(asyncio.shield(running.task), timeout=10)
        assert running.keys == []
        # Nobody reads any more: a step that was waiting goes on, and ends with the learner.
        await asyncio.wait_for(asyncio.to_thread(running.access.begin_writing), timeout=10)


async def test_in_its_spare_time_it_makes_deltas_over_many_versions_for_those_who_are_behind(
    tmp_path: Path,
) -> None:
    async with publishing(tmp_path, start=held(0), public_every=8, lag=4) as publishing_:
        for version in range(1, 9):
            await publishing_.publish(version, version - 1)
        await publishing_.stored(ArtifactKey(8, 4))
        await publishing_.stored(ArtifactKey(8, 0))
        for base in (0, 4):
            assert fetched(publishing_.store, base=held(base), version=8).version == held(8).version


async def test_while_nobody_is_behind_it_makes_steps_only(tmp_path: Path) -> None:
    async with publishing(tmp_path, start=held(0), public_every=100) as publishing_:
        for version in range(1, 9):
            await publishing_.publish(version, version - 1)
        await publishing_.stop()
        assert [key.base_version for key in publishing_.keys] == list(range(8))


def test_a_merge_is_left_when_a_newer_version_waits(tmp_path: Path) -> None:
    store, signer = open_store(tmp_path), Signer(KEY, "run", 1)
    further = FurtherArtifacts(
        StoredVersions(store, LAYOUT, words_of(0)),
        signer,
        keyframe_every_versions=100,
        public_delta_every_versions=2,
        longest_lag_versions=lambda: 0,
    )
    for version in (1, 2):
        put_words(store, KEY, words_of(version), version=version, base=held(version - 1), layout=LAYOUT)
    assert further.next_delta(2) == ArtifactKey(2, 0)
    coder, head = coder_of(words_of(2)), held(2).version
    further.make_delta(coder, head, ArtifactKey(2, 0), is_superseded=lambda: True)
    assert further.next_delta(2) == ArtifactKey(2, 0)
    further.make_delta(coder, head, ArtifactKey(2, 0), is_superseded=lambda: False)
    assert further.next_delta(2) is None
    assert further.next_delta(1) is None
