"""Artifacts on disk: nothing half-made is seen, nothing damaged is served, nothing goes back."""

import threading
from pathlib import Path

import pytest

from bench.held_policy import HeldPolicy
from node.errors import Reason
from node.identity.signatures import SigningKey
from node.values.policy import ArtifactKey
from node.weights.store.artifact_directories import INCOMING_ARTIFACTS, ArtifactDirectories
from node.weights.store.artifact_store import ArtifactStore
from support.present import present
from support.refusals import refused
from support.weights import LAYOUT, Learner, keys, put_version


def test_an_artifact_is_invisible_until_its_last_frame(store: ArtifactStore, learner: Learner) -> None:
    signed, payloads = learner.signed(1, 0)
    manifest, missing = store.offer_signed(signed)
    assert missing == (0, 1, 2, 3, 4)
    for frame in missing:
        assert store.announcement() is None
        store.write_frame(manifest.key, frame, payloads[frame])
    announcement = present(store.announcement())
    assert announcement.head == learner.versions[1].version
    assert (announcement.learner_epoch, announcement.published_at_s) == (1, 1001.0)
    assert announcement.artifacts == (manifest.artifact,)
    assert [store.read_payload(manifest.key, frame) for frame in missing] == list(payloads)


def test_an_artifact_in_which_nothing_changed_is_whole_at_once(
    store: ArtifactStore, learner: Learner
) -> None:
    learner.versions[1] = HeldPolicy.of(1, learner.words(0).copy(), layout=LAYOUT)
    assert store.offer_signed(learner.signed(1, 0)[0])[1] == ()
    assert keys(store) == [(1, 0)]


def test_a_frame_that_came_damaged_is_refused_and_still_missing(
    store: ArtifactStore, learner: Learner
) -> None:
    signed, payloads = learner.signed(1, 0)
    key = store.offer_signed(signed)[0].key
    with refused(Reason.DAMAGED):
        store.write_frame(key, 1, payloads[1][:-1] + bytes([payloads[1][-1] ^ 1]))
    with refused(Reason.DAMAGED):
        store.write_frame(key, 1, payloads[1][:-1])
    assert store.missing(key) == (0, 1, 2, 3, 4)


def test_what_was_not_offered_is_unknown(store: ArtifactStore) -> None:
    key = ArtifactKey(3, 2)
    for use in (
        lambda: store.write_frame(key, 0, b""),
        lambda: store.read_payload(key, 0),
        lambda: store.manifest(key),
        lambda: store.missing(key),
        lambda: store.lease(key).__enter__(),
        lambda: store.set_arriving(key, True),
        lambda: store.has(key, 0),
    ):
        with refused(Reason.UNKNOWN_VERSION):
            use()


def test_only_the_learner_of_the_run_can_offer_anything(store: ArtifactStore, learner: Learner) -> None:
    with refused(Reason.BAD_SIGNATURE):
        store.offer_signed(Learner(key=SigningKey.generate()).signed(1, 0)[0])
    with refused(Reason.FOREIGN_RUN):
        store.offer_signed(Learner(key=learner.key, run_id="other").signed(1, 0)[0])


def test_the_head_is_the_newest_version_a_fresh_peer_can_reach(
    store: ArtifactStore, learner: Learner
) -> None:
    learner.put(store, (1, 0), (3, 2))
    announcement = present(store.announcement())
    assert announcement.head.number == 1
    learner.put(store, (2, 1))
    announcement = present(store.announcement())
    assert announcement.head == learner.versions[3].version
    assert announcement.published_at_s == 1003.0


def test_every_change_is_told_once_to_who_listens(store: ArtifactStore, learner: Learner) -> None:
    told: list[list[tuple[int, int]]] = []
    with store.listening(lambda: told.append(keys(store))):
        learner.put(store, (1, 0), (2, 1))
        store.offer_signed(learner.signed(3, 2)[0])
        learner.put(store, (1, 0))
    learner.put(store, (3, 2))
    assert told == [[(1, 0)], [(1, 0), (2, 1)]]


def test_a_replayed_artifact_that_was_dropped_is_refused(store: ArtifactStore, learner: Learner) -> None:
    replayed = learner.signed(1, 0)[0]
    learner.put(store, (1, 0), (2, None), (3, None))
    assert keys(store) == [(2, -1), (3, -1)]
    with refused(Reason.ROLLBACK):
        store.offer_signed(replayed)


def test_nobody_is_told_to_wait_for_what_stopped_arriving(store: ArtifactStore, learner: Learner) -> None:
    """A relay leaves a copy for what is newer, and may never go on with it."""
    learner.put(store, (1, 0))
    signed, payloads = learner.signed(2, 1)
    key = ArtifactKey(2, 1)
    store.offer_signed(signed)
    store.set_arriving(key, True)
    store.write_frame(key, 0, payloads[0])
    assert store.is_awaited(key, 1)
    with refused(Reason.DAMAGED):  # asked for between two looks: it comes
        store.read_payload(key, 1)
    store.set_arriving(key, False)
    assert store.read_payload(key, 0) == payloads[0]
    with refused(Reason.UNKNOWN_VERSION):
        store.read_payload(key, 1)


def test_old_artifacts_go_when_there_are_enough_keyframes(
    store: ArtifactStore, learner: Learner, tmp_path: Path
) -> None:
    learner.put(store, (1, 0), (2, 1), (2, None), (3, 2), (4, 3), (4, None), (5, 4))
    assert keys(store) == [(2, -1), (3, 2), (4, -1), (4, 3), (5, 4)]
    assert sorted(path.name for path in (tmp_path / "complete").iterdir()) == [
        "2-key",
        "3-2",
        "4-3",
        "4-key",
        "5-4",
    ]
    assert not list((tmp_path / "scratch").iterdir())


def test_what_a_reader_has_found_is_not_cleaned_away_before_it_is_leased(
    learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = learner.store(tmp_path, retained_keyframes=1)
    learner.put(store, (1, None))
    old, new = ArtifactKey(1), learner.signed(2, None)
    find = ArtifactDirectories.find
    cleaners: list[threading.Thread] = []

    def find_while_the_cleaner_runs(directories: ArtifactDirectories, key: ArtifactKey) -> object:
        found = find(directories, key)
        if key == old and not cleaners:
            cleaners.append(threading.Thread(target=put_version, args=(store, *new)))
            cleaners[0].start()
            cleaners[0].join(timeout=0.05)
        return found

    monkeypatch.setattr(ArtifactDirectories, "find", find_while_the_cleaner_runs)
    with store.lease(old):
        cleaners[0].join(timeout=10)
        assert (2, -1) in keys(store)
        assert store.read_payload(old, 0) == learner.signed(1, None)[1][0]


def test_what_is_arriving_is_announced_and_awaited_until_it_is_whole_or_given_up(
    store: ArtifactStore, learner: Learner
) -> None:
    signed, payloads = learner.signed(1, 0)
    key = ArtifactKey(1, 0)
    store.offer_signed(signed)
    assert store.announcement() is None
    store.set_arriving(key, True)
    assert keys(store) == [(1, 0)]
    assert store.whole() == ()
    heard = []
    with store.listening_to_frames(lambda: heard.append(1)):
        store.write_frame(key, 0, payloads[0])
        assert not store.is_awaited(key, 0)
        assert store.is_awaited(key, 1)
        store.set_arriving(key, False)
    assert len(heard) == 2
    assert not store.is_awaited(key, 1)
    assert keys(store) == []
    store.set_arriving(key, True)
    for frame in store.missing(key):
        store.write_frame(key, frame, payloads[frame])
    store.set_arriving(key, False)
    assert keys(store) == [(1, 0)]
    assert [artifact.key for artifact in store.whole()] == [key]


def test_unfinished_offers_are_bounded(store: ArtifactStore, learner: Learner, tmp_path: Path) -> None:
    for version in range(1, INCOMING_ARTIFACTS + 4):
        store.offer_signed(learner.signed(version, None)[0])
    assert len(list((tmp_path / "incoming").iterdir())) == INCOMING_ARTIFACTS
    with refused(Reason.UNKNOWN_VERSION):
        store.missing(ArtifactKey(3))
    assert store.missing(ArtifactKey(4)) == (0, 1, 2, 3, 4)


def test_the_same_version_coded_again_replaces_only_what_was_unfinished(
    store: ArtifactStore, learner: Learner
) -> None:
    first = learner.signed(1, 0)
    store.offer_signed(first[0])
    learner.epoch = 2
    second = learner.signed(1, 0)
    key = store.offer_signed(second[0])[0].key
    assert store.manifest(key).signed == second[0]
    learner.put(store, (1, 0))
    learner.epoch = 3
    assert store.offer_signed(learner.signed(1, 0)[0])[1] == ()
    assert store.manifest(key).signed == second[0]


def test_what_is_withheld_is_whole_and_not_announced_until_it_is_released(
    store: ArtifactStore, learner: Learner
) -> None:
    learner.put(store, (1, 0))
    heard = []
    with store.withholding(lambda artifact: artifact.key.version > 1):
        with store.listening(lambda: heard.append(keys(store))):
            learner.put(store, (2, 1))
        assert heard == [[(1, 0)]], "told of what is whole now"
        assert store.head() == learner.versions[1].version
        assert [manifest.key.version for manifest in store.whole()] == [1, 2]
        learner.put(store, (3, 2))
        store.release(ArtifactKey(3, 2))
        assert store.head() == learner.versions[1].version, "no way leads to version 3 without version 2"
        store.release(ArtifactKey(2, 1))
        assert store.head() == learner.versions[3].version
        learner.put(store, (4, 3))
        assert store.head() == learner.versions[3].version
    assert store.head() == learner.versions[4].version, "nothing is withheld by somebody who has gone"


def test_a_keyframe_that_is_withheld_leaves_a_way_to_the_head(tmp_path: Path, learner: Learner) -> None:
    store = learner.store(tmp_path, retained_keyframes=1)
    learner.put(store, (1, None), (2, 1))
    with store.withholding(lambda artifact: True):
        learner.put(store, (3, None))
        assert store.head() == learner.versions[2].version
        assert keys(store) == [(1, -1), (2, 1)]
        store.release(ArtifactKey(3))
    assert keys(store) == [(3, -1)]
