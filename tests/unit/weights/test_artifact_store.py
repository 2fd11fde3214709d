"""A store's view of artifacts that arrive, are damaged or come from several learners."""

from pathlib import Path

import pytest

from bench.held_policy import HeldPolicy
from node.errors import Reason
from node.values.policy import ArtifactKey
from node.weights.store.artifact_store import ArtifactStore
from support.present import present
from support.refusals import refused
from support.weights import LAYOUT, Learner, flip_bit, frames_file, keys

KEY = ArtifactKey(1, 0)


def test_a_frame_that_rots_while_its_artifact_arrives_is_missing_and_nobody_waits_for_it_for_ever(
    store: ArtifactStore, learner: Learner, tmp_path: Path
) -> None:
    signed, payloads = learner.signed(1, 0)
    store.offer_signed(signed)
    store.set_arriving(KEY, True)
    store.write_frame(KEY, 0, payloads[0])
    assert (store.has(KEY, 0), store.has(KEY, 1)) == (True, False)
    flip_bit(frames_file(tmp_path, KEY, room="incoming"), 0)
    with refused(Reason.DAMAGED):
        store.read_payload(KEY, 0)
    assert store.missing(KEY) == (0, 1, 2, 3, 4)
    assert store.is_awaited(KEY, 0)
    store.set_arriving(KEY, False)
    with refused(Reason.UNKNOWN_VERSION):
        store.read_payload(KEY, 0)


def test_the_head_is_of_the_newest_learner_that_made_it(store: ArtifactStore, learner: Learner) -> None:
    learner.put(store, (2, 1))
    assert keys(store) == []
    learner.epoch = 2
    learner.put(store, (2, None))
    announcement = present(store.announcement())
    assert (announcement.head.number, announcement.learner_epoch) == (2, 2)
    learner.epoch = 3
    learner.put(store, (2, 0))
    again = present(store.announcement())
    assert (again.head, again.learner_epoch) == (announcement.head, 2)


def test_a_store_without_its_mark_and_without_artifacts_begins_anew(
    store: ArtifactStore, learner: Learner, tmp_path: Path
) -> None:
    (tmp_path / "head.json").write_bytes(b"{")
    reopened = learner.store(tmp_path)
    assert reopened.announcement() is None
    learner.epoch = 0
    learner.put(reopened, (1, 0))
    assert keys(reopened) == [(1, 0)]


def test_what_an_older_learner_made_of_a_version_goes_when_a_newer_one_makes_it_otherwise(
    store: ArtifactStore, learner: Learner
) -> None:
    learner.put(store, (1, 0))
    for base in (2, None):
        store.offer_signed(learner.signed(3, base)[0])
    fork = Learner(key=learner.key, epoch=2, versions={**learner.versions})
    fork.versions[3] = HeldPolicy.of(3, learner.words(4).copy(), layout=LAYOUT)
    store.offer_signed(fork.signed(3, 2)[0])
    assert store.missing(ArtifactKey(3, 2)) == (0, 1, 2, 3, 4)
    with refused(Reason.UNKNOWN_VERSION):
        store.missing(ArtifactKey(3))


@pytest.mark.parametrize("is_read", [False, True])
def test_an_artifact_that_was_asked_for_with_more_to_come_stays_beyond_its_retention(
    learner: Learner, tmp_path: Path, is_read: bool
) -> None:
    store = learner.store(tmp_path, retained_keyframes=1, monotonic=lambda: 0.0)
    learner.put(store, (1, None))
    with store.lease(ArtifactKey(1), lingers=is_read):
        pass
    learner.put(store, (2, None))
    assert keys(store) == [*([(1, -1)] if is_read else []), (2, -1)]
