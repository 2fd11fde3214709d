"""A store whose disk is full or cannot be used, and the drafts it writes there."""

from pathlib import Path

import pytest

from node.errors import Reason
from node.values.policy import ArtifactKey
from node.weights.store.artifact_store import ArtifactStore
from support.full_disk import full_disk
from support.refusals import cannot_start, refused
from support.weights import Learner, keys, put_version


def test_a_full_disk_refuses_the_frame_and_serves_on(learner: Learner, tmp_path: Path) -> None:
    store = learner.store(tmp_path)
    learner.put(store, (1, 0))
    signed, payloads = learner.signed(2, None)
    key = store.offer_signed(signed)[0].key
    with full_disk(2000):
        store.write_frame(key, 0, payloads[0])
        with refused(Reason.DISK):
            store.write_frame(key, 2, payloads[2])
        assert 2 in store.missing(key)
        assert store.read_payload(ArtifactKey(1, 0), 0) == learner.signed(1, 0)[1][0]
    for frame in store.missing(key):
        store.write_frame(key, frame, payloads[frame])
    assert keys(store) == [(1, 0), (2, -1)]


def test_a_disk_too_full_for_a_manifest_refuses_the_offer_and_takes_it_later(
    learner: Learner, tmp_path: Path
) -> None:
    store = learner.store(tmp_path)
    signed = learner.signed(1, 0)[0]
    with full_disk(len(signed) - 1), refused(Reason.DISK):
        store.offer_signed(signed)
    learner.put(store, (1, 0))
    assert keys(store) == [(1, 0)]


def test_a_directory_that_cannot_be_used_ends_the_start(learner: Learner, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with cannot_start(f"{tmp_path}/file"):
        learner.store(tmp_path / "file")


def test_a_draft_that_is_given_up_leaves_nothing_behind(store: ArtifactStore, tmp_path: Path) -> None:
    def files() -> list[Path]:
        return [path for path in tmp_path.rglob("*") if path.is_file()]

    before = files()
    with store.draft() as draft:
        draft.append(b"x" * 100_000)
        assert files() != before
    assert files() == before


def test_payloads_that_are_not_the_manifests_are_our_own_mistake(
    store: ArtifactStore, learner: Learner
) -> None:
    signed, payloads = learner.signed(1, 0)
    with pytest.raises(ValueError, match="its manifest says"):
        put_version(store, signed, payloads[:-1])
    assert keys(store) == []


def test_a_disk_without_room_for_a_draft_is_said(
    store: ArtifactStore, learner: Learner, tmp_path: Path
) -> None:
    (tmp_path / "scratch").rmdir()
    with refused(Reason.DISK):
        learner.put(store, (1, 0))
