"""Fetched artifacts are found after a restart, continued, and forgotten once they are not needed."""

import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bench.held_policy import HeldPolicy
from node.errors import Reason
from node.weights.format.manifest import Manifest, verify_signed
from sampler.versions.delta_log import DeltaLog, LoggedArtifact
from support.present import present
from support.weights import LAYOUT, Learner, flip_bit

LEARNER = Learner()
LEARNER.words(4)


def log_in(directory: Path, *, refusals: Counter[Reason] | None = None) -> DeltaLog:
    counts: Counter[Reason] = Counter() if refusals is None else refusals
    return DeltaLog(
        directory,
        public_key=LEARNER.key.public_key,
        run_id=LEARNER.run_id,
        count_refusal=lambda reason: counts.update([reason]),
    )


def signed(version: int, base: int | None, learner: Learner = LEARNER) -> tuple[Manifest, tuple[bytes, ...]]:
    """Return an artifact's manifest and its payloads."""
    manifest, payloads = learner.signed(version, base)
    return verify_signed(manifest, public_key=learner.key.public_key, run_id=learner.run_id), payloads


def begun(log: DeltaLog, version: int, base: int | None) -> tuple[LoggedArtifact, tuple[bytes, ...]]:
    """Begin an artifact; return it and its payloads."""
    manifest, payloads = signed(version, base)
    return present(log.begin(manifest)), payloads


def fill(log: DeltaLog, *artifacts: tuple[int, int | None]) -> None:
    """Log artifacts whole."""
    for version, base in artifacts:
        artifact, payloads = begun(log, version, base)
        assert all(artifact.keep(frame, payload) for frame, payload in enumerate(payloads))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def manifest_after(log: DeltaLog, version: int) -> Manifest | None:
    artifact = log.after(LEARNER.versions[version].version)
    return None if artifact is None else artifact.manifest


def test_unusable_artifacts_are_removed_when_the_log_is_opened(
    tmp_path: Path,
) -> None:
    fill(log_in(tmp_path), (1, 0), (2, 1), (3, 2), (4, 3))
    flip_bit(tmp_path / "1-0" / "manifest", 30)
    shutil.rmtree(tmp_path / "3-2")
    (tmp_path / "a stray file").touch()
    log = log_in(tmp_path)
    assert names(tmp_path) == ["2-1", "4-3", "a stray file"]
    assert log.reach(LEARNER.versions[1].version) == 2
    assert log.reach(LEARNER.versions[3].version) == 4


def test_the_log_goes_furthest_from_what_is_held_and_never_to_where_it_is_already(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    fill(log, (1, 0), (2, None), (3, 0), (3, 2))
    following = {number: manifest_after(log, number) for number in range(4)}
    assert {number: m and (m.version, m.base_version) for number, m in following.items()} == {
        0: (3, 0),
        1: (2, -1),
        2: (3, 2),
        3: None,
    }
    assert [log.reach(LEARNER.versions[number].version) for number in range(4)] == [3, 3, 3, 3]


def test_a_delta_leads_on_only_from_the_very_words_it_was_made_from(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    fill(log, (1, 0))
    other = HeldPolicy.of(0, LEARNER.words(0) ^ np.uint16(1), layout=LAYOUT)
    assert log.after(other.version) is None
    assert log.reach(other.version) == 0


def test_an_artifact_that_is_not_whole_leads_nowhere(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    artifact, payloads = begun(log, 1, 0)
    for frame in range(4):
        artifact.keep(frame, payloads[frame])
    assert manifest_after(log, 0) is None
    artifact.keep(4, payloads[4])
    assert manifest_after(log, 0) is not None


def test_the_log_weighs_what_its_manifests_say_and_drops_up_to_the_version_that_was_copied(
    tmp_path: Path,
) -> None:
    log = log_in(tmp_path)
    fill(log, (1, 0), (2, 1), (3, 2))
    sizes = {version: sum(map(len, LEARNER.signed(version, version - 1)[1])) for version in (1, 2, 3)}
    assert log.size_bytes == sum(sizes.values())
    log.drop_until(2)
    assert (log.size_bytes, names(tmp_path)) == (sizes[3], ["3-2"])


def test_only_the_newest_unfinished_artifact_is_kept_beside_the_whole_ones(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    fill(log, (1, 0))
    begun(log, 2, 1)
    begun(log, 3, 1)
    assert names(tmp_path) == ["1-0", "3-1"]


def test_an_artifact_begun_again_goes_on_and_one_that_was_made_anew_starts_over(tmp_path: Path) -> None:
    learner = Learner(key=LEARNER.key)
    log = log_in(tmp_path)
    artifact, payloads = begun(log, 1, 0)
    artifact.keep(2, payloads[2])
    assert begun(log, 1, 0)[0].payload(2) == payloads[2]
    learner.epoch = 2
    manifest, _ = signed(1, 0, learner)
    for is_whole in (False, True):
        if is_whole:
            fill(log, (1, 0))
        assert [frame for frame in range(5) if present(log.begin(manifest)).payload(frame) is not None] == []


def test_a_payload_that_rotted_is_fetched_and_kept_again(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    artifact, payloads = begun(log, 1, 0)
    assert artifact.keep(0, payloads[0])
    flip_bit(tmp_path / "1-0" / "frames", 0)
    assert artifact.keep(0, payloads[0])  # taken for written: nobody has read it yet
    assert artifact.payload(0) is None
    assert artifact.keep(0, payloads[0])
    assert artifact.payload(0) == payloads[0]


def test_a_version_goes_unlogged_where_the_log_has_no_room_for_it(tmp_path: Path) -> None:
    refusals: Counter[Reason] = Counter()
    log = log_in(tmp_path / "log", refusals=refusals)
    shutil.rmtree(tmp_path / "log")
    assert log.begin(signed(1, 0)[0]) is None
    assert refusals == {Reason.DISK: 1}
    assert log.size_bytes == 0


def test_kept_payloads_are_on_disk_before_the_sync_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, payloads = begun(log_in(tmp_path), 1, 0)
    artifact.keep(0, payloads[0])

    def full(_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="Input/output"):
        artifact.sync()
