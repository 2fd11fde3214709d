"""Where a store's artifacts are on disk, through crashes, damage and too many offers."""

import os
import shutil
import stat
from pathlib import Path

import pytest

from node.errors import Reason
from node.system import durable
from node.values import limits
from node.values.policy import ArtifactKey
from node.weights.format.manifest import verify_signed
from node.weights.store.artifact_directories import ArtifactDirectories
from node.weights.store.artifact_files import ArtifactFiles
from support.present import present
from support.refusals import refused
from support.weights import Learner, flip_bit, offsets

KEY = ArtifactKey(1, 0)


def opened(root: Path, learner: Learner) -> ArtifactDirectories:
    return ArtifactDirectories(root, public_key=learner.key.public_key, run_id=learner.run_id)


def offered(directories: ArtifactDirectories, learner: Learner, version: int, base: int) -> ArtifactFiles:
    """Make an artifact without payloads."""
    signed, _ = learner.signed(version, base)
    manifest = verify_signed(signed, public_key=learner.key.public_key, run_id=learner.run_id)
    directories.create(manifest)
    return directories.find(manifest.key)


def completed(directories: ArtifactDirectories, learner: Learner, version: int, base: int) -> ArtifactFiles:
    """Make an artifact with all payloads."""
    artifact = offered(directories, learner, version, base)
    for frame, payload in enumerate(learner.signed(version, base)[1]):
        artifact.write(frame, payload)
    directories.complete(artifact)
    return artifact


def names(root: Path) -> dict[str, list[str]]:
    return {room.name: sorted(path.name for path in room.iterdir()) for room in sorted(root.iterdir())}


def test_an_artifact_goes_from_incoming_to_complete_and_back_while_a_frame_is_damaged(
    learner: Learner, tmp_path: Path
) -> None:
    directories = opened(tmp_path, learner)
    artifact = offered(directories, learner, 1, 0)
    assert names(tmp_path) == {"complete": [], "incoming": ["1-0"], "scratch": []}
    assert not directories.is_complete(artifact)
    for frame, payload in enumerate(learner.signed(1, 0)[1]):
        artifact.write(frame, payload)
    directories.complete(artifact)
    assert names(tmp_path) == {"complete": ["1-0"], "incoming": [], "scratch": []}
    assert directories.complete_artifacts() == {KEY: artifact.manifest.artifact}
    directories.quarantine(artifact)
    assert directories.find(KEY).is_quarantined
    assert directories.complete_artifacts() == {}
    directories.complete(artifact)
    assert not directories.find(KEY).is_quarantined


def test_nobody_waits_for_the_damaged_frame_of_an_artifact_that_was_removed(
    learner: Learner, tmp_path: Path
) -> None:
    directories = opened(tmp_path, learner)
    directories.quarantine(completed(directories, learner, 1, 0))
    directories.remove(KEY)
    directories.remove(KEY)
    assert names(tmp_path) == {"complete": [], "incoming": [], "scratch": []}
    offered(directories, learner, 1, 0)
    assert not directories.find(KEY).is_quarantined


def test_an_artifact_in_both_directories_after_a_crash_is_the_complete_one(
    learner: Learner, tmp_path: Path
) -> None:
    completed(opened(tmp_path, learner), learner, 1, 0)
    shutil.copytree(tmp_path / "complete" / "1-0", tmp_path / "incoming" / "1-0")
    directories = opened(tmp_path, learner)
    assert names(tmp_path) == {"complete": ["1-0"], "incoming": [], "scratch": []}
    assert directories.is_complete(directories.find(KEY))


@pytest.mark.parametrize("has_copy", [False, True])
def test_a_complete_artifact_cut_short_is_incoming_after_a_restart(
    learner: Learner, tmp_path: Path, has_copy: bool
) -> None:
    completed(opened(tmp_path, learner), learner, 1, 0)
    if has_copy:
        shutil.copytree(tmp_path / "complete" / "1-0", tmp_path / "incoming" / "1-0")
    payloads = learner.signed(1, 0)[1]
    os.truncate(tmp_path / "complete" / "1-0" / "frames", offsets(payloads)[3])
    directories = opened(tmp_path, learner)
    assert names(tmp_path) == {"complete": [], "incoming": ["1-0"], "scratch": []}
    assert directories.find(KEY).missing() == (3, 4)


def test_a_frame_that_rotted_in_an_unfinished_artifact_is_missing_after_a_restart(
    learner: Learner, tmp_path: Path
) -> None:
    artifact = offered(opened(tmp_path, learner), learner, 1, 0)
    payloads = learner.signed(1, 0)[1]
    for frame, payload in enumerate(payloads):
        artifact.write(frame, payload)
    flip_bit(tmp_path / "incoming" / "1-0" / "frames", offsets(payloads)[2])
    assert opened(tmp_path, learner).find(KEY).missing() == (2,)


def test_no_more_artifacts_are_retained_than_an_announcement_holds(
    learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ARTIFACTS_PER_ANNOUNCEMENT", 2)
    directories = opened(tmp_path, learner)
    for version in (1, 2):
        completed(directories, learner, version, version - 1)
    with refused(Reason.OVER_LIMIT, "2 artifacts"):
        offered(directories, learner, 3, 2)
    offered(directories, learner, 2, 1)


def test_a_payload_is_whole_on_disk_however_little_each_write_takes(
    learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = offered(opened(tmp_path, learner), learner, 1, 0)
    payloads = learner.signed(1, 0)[1]
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:7], offset))
    artifact.write(1, payloads[1])
    file = present(artifact.open())
    assert artifact.read(file, 1, verifies=True) == payloads[1]
    assert file.closed


def test_payloads_that_vanished_come_back_as_a_file_of_the_owners(learner: Learner, tmp_path: Path) -> None:
    artifact = offered(opened(tmp_path, learner), learner, 1, 0)
    frames = artifact.directory / "frames"
    frames.unlink()
    assert artifact.open() is None
    artifact.write(0, learner.signed(1, 0)[1][0])
    assert stat.S_IMODE(frames.stat().st_mode) == 0o600


def test_an_artifact_is_where_it_was_moved_to_even_if_the_move_may_not_last(
    learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = opened(tmp_path, learner)
    artifact = offered(directories, learner, 1, 0)

    def moves_and_fails(source: Path, target: Path) -> None:
        source.rename(target)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(durable, "rename", moves_and_fails)
    with pytest.raises(OSError, match="Input/output"):
        directories.complete(artifact)
    assert artifact.directory == tmp_path / "complete" / "1-0"
