"""Disk of a restarted sampler; test_crash_points.py kills it at any write."""

import os
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from bench.held_policy import HeldPolicy
from bench.whole_versions import EncodedVersion
from node.errors import Reason
from node.values.policy import PolicyVersion
from node.weights.format.digests import Words
from node.weights.format.manifest import signed_by
from node.weights.store.high_water import HighWater
from sampler.versions.delta_log import LoggedArtifact
from sampler.versions.saved_policy import HELD_FILE, LOG_DIRECTORY, SavedPolicy
from sampler.versions.version_assembly import VersionAssembly
from support.clock import ManualClock
from support.model_words import live_words, words_of
from support.present import present
from support.refusals import refused
from support.weights import LAYOUT, Learner, flip_bit

LEARNER = Learner()
LEARNER.words(4)
Chain = tuple[tuple[int, int | None], ...]
CHAIN: Chain = ((1, 0), (2, 1), (3, None), (4, 3))


def disk_of(
    directory: Path, *, save_every_s: float = 0.0, refusals: Counter[Reason] | None = None
) -> SavedPolicy:
    counts: Counter[Reason] = Counter() if refusals is None else refusals
    return SavedPolicy(
        directory,
        layout=LAYOUT,
        public_key=LEARNER.key.public_key,
        run_id=LEARNER.run_id,
        save_every_s=save_every_s,
        count_refusal=lambda reason: counts.update([reason]),
        clock=ManualClock(),
    )


def load(disk: SavedPolicy, words0: Words = LEARNER.versions[0].words) -> tuple[PolicyVersion, Words]:
    """Start a sampler whose base model is ``words0``; return what it holds and its words."""
    weights = live_words(words0)
    disk.open(weights.live)
    return disk.load(weights), words_of(weights.live)


@cache
def artifact(version: int, base_version: int | None) -> EncodedVersion:
    """Return an artifact of the learner, signed."""
    encoded = LEARNER.encode(version, base_version)
    return replace(encoded, manifest=signed_by(encoded.manifest, LEARNER.key))


def live(directory: Path, *, until: int = 4, save_every_s: float = 0.0, chain: Chain = CHAIN) -> list[int]:
    """Start a sampler on ``directory`` and follow the chain; return the versions held."""
    disk = disk_of(directory, save_every_s=save_every_s)
    weights = live_words(LEARNER.versions[0].words)
    disk.open(weights.live)
    held = disk.load(weights)
    numbers = [held.number]
    for version, base_version in chain:
        if not held.number < version <= until:
            continue
        encoded = artifact(version, base_version)
        payloads = present(disk.begin(encoded.manifest))
        assembly = VersionAssembly(
            encoded.manifest,
            layout=LAYOUT,
            base=weights.live,
            base_version=held,
            payloads=payloads,
            weights=weights,
        )
        assembly.take_held()
        for frame in assembly.missing():
            assembly.put(frame, encoded.payloads[frame])
        assembly.finish()
        disk.remember(encoded.manifest, payloads)
        assembly.apply()
        held = encoded.manifest.policy_version
        disk.compact(held, weights.live)
        numbers.append(held.number)
    np.testing.assert_array_equal(words_of(weights.live), LEARNER.versions[held.number].words)
    return numbers


@pytest.mark.parametrize("is_rotten", [False, True])
def test_a_way_that_began_at_the_base_model_again_is_gone_on_with_past_the_copy_unless_it_rotted(
    tmp_path: Path, is_rotten: bool
) -> None:
    """After a long sleep: the copy is of version 1, and the delta to version 3 starts from version 0."""
    live(tmp_path, until=1)
    assert (tmp_path / HELD_FILE).exists()
    disk = disk_of(tmp_path, save_every_s=3600.0)
    load(disk)
    encoded = artifact(3, 0)
    payloads = present(disk.begin(encoded.manifest))
    for frame, payload in enumerate(encoded.payloads):
        payloads.keep(frame, payload)
    disk.remember(encoded.manifest, payloads)
    if is_rotten:
        flip_bit(tmp_path / LOG_DIRECTORY / "3-0" / "frames", 3)
    held, words = load(disk_of(tmp_path))
    assert held == LEARNER.versions[1 if is_rotten else 3].version
    np.testing.assert_array_equal(words, LEARNER.versions[held.number].words)


def test_a_log_that_outgrew_the_model_is_folded_before_its_time(tmp_path: Path) -> None:
    keyframes: Chain = ((1, None), (2, None))
    live(tmp_path, until=1, save_every_s=3600.0, chain=keyframes)
    assert not (tmp_path / HELD_FILE).exists()
    live(tmp_path, until=2, save_every_s=3600.0, chain=keyframes)
    assert (tmp_path / HELD_FILE).exists()
    assert list((tmp_path / LOG_DIRECTORY).iterdir()) == []


def test_a_logged_version_that_fails_half_applied_is_given_up_and_the_one_before_it_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(tmp_path, until=2, save_every_s=3600.0)
    read = LoggedArtifact.payload
    reads: Counter[int] = Counter()

    def rots_after_it_was_verified(artifact: LoggedArtifact, frame: int) -> bytes | None:
        is_second = artifact.manifest.version == 2
        reads[frame] += is_second
        return None if is_second and frame == 3 and reads[3] == 2 else read(artifact, frame)

    monkeypatch.setattr(LoggedArtifact, "payload", rots_after_it_was_verified)
    held, words = load(disk_of(tmp_path))
    assert reads[3] == 2
    assert held == LEARNER.versions[1].version
    np.testing.assert_array_equal(words, LEARNER.versions[1].words)


def test_another_base_model_than_the_log_starts_from_keeps_the_base(tmp_path: Path) -> None:
    live(tmp_path, until=2, save_every_s=3600.0)
    other = LEARNER.versions[0].words ^ np.uint16(1)
    held, words = load(disk_of(tmp_path), other)
    assert held == HeldPolicy.of(0, other, layout=LAYOUT).version
    np.testing.assert_array_equal(words, other)


def test_a_mark_that_cannot_be_written_refuses_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = disk_of(tmp_path)
    load(disk)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(HighWater, "save", fail)
    with refused(Reason.DISK):
        disk.remember(artifact(1, 0).manifest, None)


def test_after_one_payload_that_could_not_be_written_no_other_of_its_version_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals: Counter[Reason] = Counter()
    disk = disk_of(tmp_path, refusals=refusals)
    load(disk)
    encoded = artifact(1, 0)
    staged = present(disk.begin(encoded.manifest))
    assert staged.keep(0, encoded.payloads[0])

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        assert not staged.keep(1, encoded.payloads[1])
    assert not staged.keep(2, encoded.payloads[2])
    assert staged.keep(0, encoded.payloads[0])
    assert [frame for frame in range(5) if staged.payload(frame) is not None] == [0]
    assert refusals == {Reason.DISK: 1}
    monkeypatch.setattr(os, "fsync", full)
    staged.sync()  # nothing more is promised of it
