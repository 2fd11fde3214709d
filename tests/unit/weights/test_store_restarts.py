"""A store started again on the disk it left: after a kill, damage, a lost mark, a new learner."""

import os
from pathlib import Path

import pytest

from node.errors import Reason
from node.weights.store.artifact_store import ArtifactStore
from support.refusals import refused
from support.weights import Learner, flip_bit, frames_file, keys


def test_a_kill_before_the_rename_loses_nothing(
    store: ArtifactStore, learner: Learner, tmp_path: Path
) -> None:
    learner.put(store, (1, 0))
    (tmp_path / "complete" / "1-0").rename(tmp_path / "incoming" / "1-0")
    assert keys(learner.store(tmp_path)) == [(1, 0)]


def test_a_half_written_frame_is_missing_after_a_restart(
    store: ArtifactStore, learner: Learner, tmp_path: Path
) -> None:
    signed, payloads = learner.signed(1, 0)
    key = store.offer_signed(signed)[0].key
    store.write_frame(key, 0, payloads[0])
    store.write_frame(key, 1, payloads[1])
    os.truncate(frames_file(tmp_path, key, room="incoming"), len(payloads[0]) + 3)
    assert learner.store(tmp_path).missing(key) == (1, 2, 3, 4)


@pytest.mark.parametrize(
    "damage",
    [
        lambda directory: (directory / "manifest").write_bytes(b""),
        lambda directory: flip_bit(directory / "manifest", 40),
        lambda directory: (directory / "manifest").unlink(),
        lambda directory: (directory / "frames").unlink(),
        lambda directory: directory.rename(directory.with_name("7-6")),
    ],
    ids=["empty manifest", "flipped bit in the manifest", "no manifest", "no frames", "another name"],
)
def test_an_unusable_directory_is_dropped_and_the_rest_serves(
    store: ArtifactStore, learner: Learner, tmp_path: Path, damage: object
) -> None:
    learner.put(store, (1, 0), (2, 1))
    assert callable(damage)
    damage(tmp_path / "complete" / "2-1")
    reopened = learner.store(tmp_path)
    assert keys(reopened) == [(1, 0)]
    learner.put(reopened, (2, 1))
    assert keys(reopened) == [(1, 0), (2, 1)]


def test_the_head_does_not_go_back_when_its_artifact_is_lost(
    store: ArtifactStore, learner: Learner, tmp_path: Path
) -> None:
    learner.put(store, (1, 0), (2, 1))
    flip_bit(tmp_path / "complete" / "2-1" / "manifest", 40)
    reopened = learner.store(tmp_path)
    assert reopened.head() == learner.versions[2].version
    assert keys(reopened) == [(1, 0)]


def test_a_lost_mark_is_made_again_from_what_is_retained(
    store: ArtifactStore, learner: Learner, tmp_path: Path
) -> None:
    learner.epoch = 5
    learner.put(store, (1, 0), (2, 1))
    before = store.announcement()
    (tmp_path / "head.json").write_bytes(b"")
    reopened = learner.store(tmp_path)
    assert reopened.announcement() == before
    learner.epoch = 4
    with refused(Reason.FENCED):
        learner.put(reopened, (3, 2))


def test_a_new_epoch_fences_the_old_learner_across_a_restart(
    store: ArtifactStore, learner: Learner, tmp_path: Path
) -> None:
    learner.put(store, (1, 0))
    learner.epoch = 2
    store.offer_signed(learner.signed(2, 1)[0])
    learner.epoch = 1
    for each in (store, learner.store(tmp_path)):
        with refused(Reason.FENCED):
            each.offer_signed(learner.signed(3, 1)[0])


def test_what_a_killed_process_was_making_is_gone_at_the_next_start(
    learner: Learner, store: ArtifactStore, tmp_path: Path
) -> None:
    with store.draft():
        assert len(list((tmp_path / "scratch").iterdir())) == 1
        restarted = learner.store(tmp_path)
        assert list((tmp_path / "scratch").iterdir()) == []
    learner.put(restarted, (1, 0))
    assert keys(restarted) == [(1, 0)]
