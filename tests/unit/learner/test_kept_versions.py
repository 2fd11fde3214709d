"""Versions that outlast the retention of a learner's store."""

from pathlib import Path

import pytest

from learner.publishing.kept_versions import KeptVersions, Wanted, was_skipped
from learner.publishing.spaced_versions import Spacing
from node.weights.store.artifact_store import ArtifactStore
from support.weights import Learner


def publish(store: ArtifactStore, learner: Learner, kept: KeptVersions, *versions: int) -> None:
    """Publish versions, every third as a keyframe too."""
    for version in versions:
        learner.put(store, (version, version - 1))
        if version % 3 == 0:
            kept.secure()
            learner.put(store, (version, None))


def test_nothing_that_was_kept_is_let_go_before_a_coordinator_has_said_what_is_worth_keeping(
    tmp_path: Path,
) -> None:
    learner, said = Learner(), [Wanted((2, 4))]
    store = learner.store(tmp_path, retained_keyframes=1)
    kept = KeptVersions(store, wanted=lambda: said[0], spacing=Spacing(10, most=0))
    publish(store, learner, kept, *range(1, 10))
    assert store.pinned == {2, 4}
    said[0] = Wanted((4,), is_all=False)
    kept.secure()
    assert store.pinned == {2, 4}
    said[0] = Wanted((4,))
    kept.secure()
    assert store.pinned == {4}


def test_of_old_versions_keyframes_are_kept_one_for_each_doubling_of_their_age(tmp_path: Path) -> None:
    learner = Learner()
    store = learner.store(tmp_path, retained_keyframes=1)
    kept = KeptVersions(store, wanted=lambda: Wanted(()), spacing=Spacing(3, most=2))
    publish(store, learner, kept, *range(1, 25))
    assert len(store.pinned) == 2
    assert all(version % 3 == 0 for version in store.pinned)
    there = {manifest.key.version for manifest in store.whole() if manifest.key.is_keyframe}
    assert store.pinned <= there


def test_a_version_that_is_gone_is_said_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = Learner()
    store = learner.store(tmp_path, retained_keyframes=1)
    kept = KeptVersions(store, wanted=lambda: Wanted((0, 7)), spacing=Spacing(3, most=0))
    publish(store, learner, kept, 1, 2)
    kept.secure()
    assert store.pinned == frozenset()
    assert [record.__dict__["versions"] for record in caplog.records] == [[7]]


def test_a_version_that_was_made_and_not_published_is_told_from_one_that_the_store_forgot(
    tmp_path: Path,
) -> None:
    learner = Learner()
    store = learner.store(tmp_path, retained_keyframes=1)
    assert not was_skipped(1, store)
    learner.put(store, (2, 0), (5, 2))
    assert [was_skipped(version, store) for version in range(8)] == [v not in (0, 2, 5) for v in range(8)]
    store.pin({2})
    learner.put(store, (5, None), (8, 5), (8, 0))
    assert [v for v in range(10) if was_skipped(v, store)] == [6, 7, 9]
