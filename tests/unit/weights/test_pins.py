"""Versions that a store keeps for its own process beyond its retention, across restarts, unannounced."""

import errno
from pathlib import Path

import pytest

from node.errors import RefusedError
from node.values.policy import ArtifactKey
from node.weights.assembly.stored import StoredVersions
from node.weights.store.artifact_store import ArtifactStore
from node.weights.store.catalogue import PINS_FILE
from support.full_disk import full_disk
from support.weights import LAYOUT, Learner, flip_bit, keys


def reopened(learner: Learner, directory: Path) -> ArtifactStore:
    return learner.store(directory, retained_keyframes=1)


def leads_to(store: ArtifactStore, learner: Learner, version: int) -> bool:
    try:
        with StoredVersions(store, LAYOUT, learner.words(0)).opened(version) as stored:
            held = learner.versions[version].frame_words(LAYOUT)
            return all((stored.words(frame) == held(frame)).all() for frame in range(len(LAYOUT.frames)))
    except RefusedError:
        return False


def test_a_way_to_a_pinned_version_outlasts_keyframes_and_restarts_unannounced(
    learner: Learner, tmp_path: Path
) -> None:
    store = reopened(learner, tmp_path)
    learner.put(store, (1, 0), (2, 1), (3, 2))
    store.pin([2])
    learner.put(store, (3, None))
    for again in (store, reopened(learner, tmp_path)):
        assert keys(again) == [(3, -1)]
        assert {manifest.key for manifest in again.whole()} == {
            ArtifactKey(1, 0),
            ArtifactKey(2, 1),
            ArtifactKey(3),
        }
        assert again.pinned == {2}
        assert leads_to(again, learner, 2)
    again.pin([])
    assert [manifest.key for manifest in again.whole()] == [ArtifactKey(3)]
    assert not leads_to(again, learner, 2)


def test_where_the_pins_are_damaged_nothing_is_removed_until_there_are_others(
    learner: Learner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = reopened(learner, tmp_path)
    learner.put(store, (1, 0), (2, 1))
    store.pin([1])
    flip_bit(tmp_path / PINS_FILE, 14)
    store = reopened(learner, tmp_path)
    assert "pins of a store not usable" in caplog.messages
    learner.put(store, (3, 2), (3, None))
    assert len(store.whole()) == 4
    store.pin([2])
    assert {manifest.key for manifest in store.whole()} == {
        ArtifactKey(1, 0),
        ArtifactKey(2, 1),
        ArtifactKey(3),
    }


def test_a_disk_too_full_for_the_pins_changes_none(learner: Learner, tmp_path: Path) -> None:
    store = reopened(learner, tmp_path)
    learner.put(store, (1, 0))
    store.pin([1])
    with full_disk(4), pytest.raises(OSError) as full:  # noqa: PT011 - the number tells
        store.pin([])
    assert full.value.errno == errno.EFBIG
    assert reopened(learner, tmp_path).pinned == store.pinned == {1}
