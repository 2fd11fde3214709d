"""Nothing live changes before everything was verified, and then it is bit for bit what was signed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.held_policy import HeldPolicy
from bench.whole_versions import EncodedVersion
from node.errors import Reason
from node.values.policy import PolicyVersion
from node.weights.assembly.apply import WrongBaseError
from node.weights.format.layout import Layout
from node.weights.format.manifest import DamagedFrameError, signed_by
from sampler.engines.words.model_words import ArrayWords, ModelWords
from sampler.engines.words.torch_words import LiveTensors
from sampler.versions.delta_log import DeltaLog, LoggedArtifact
from sampler.versions.held_version import MemoryScrub
from sampler.versions.version_assembly import VersionAssembly
from support.model_words import live_words, words_of
from support.present import present
from support.refusals import naming, refused
from support.weights import LAYOUT, SPECS, Learner, flip_bit

LEARNER = Learner()
DELTA = LEARNER.encode(2, 1)
KEYFRAME = LEARNER.encode(2, None)
BASE = LEARNER.versions[1]
WANTED = LEARNER.versions[2]


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def weights(request: pytest.FixtureRequest) -> LiveTensors:
    return live_words(BASE.words, dtype=request.param)


@pytest.fixture(params=["spare", "in place"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def begun(
    mode: str,
    weights: LiveTensors,
    encoded: EncodedVersion = DELTA,
    *,
    held: PolicyVersion = BASE.version,
    base: ModelWords | None = None,
    payloads: LoggedArtifact | None = None,
) -> VersionAssembly:
    """Begin a version; ``base``: what it starts from, if not what is live."""
    return VersionAssembly(
        encoded.manifest,
        layout=LAYOUT,
        weights=weights,
        base=base or weights.live,
        base_version=held,
        payloads=payloads,
        spare=weights.new_spare() if mode == "spare" else None,
    )


def put_all(version: VersionAssembly, encoded: EncodedVersion) -> None:
    assert version.take_held() == ()
    for frame in version.missing():
        version.put(frame, encoded.payloads[frame])
    version.finish()


def logged(directory: Path, encoded: EncodedVersion) -> LoggedArtifact:
    log = DeltaLog(
        directory,
        public_key=LEARNER.key.public_key,
        run_id=LEARNER.run_id,
        count_refusal=lambda reason: pytest.fail(reason),
    )
    artifact = present(log.begin(signed_by(encoded.manifest, LEARNER.key)))
    return artifact


def spoil(weights: LiveTensors, frame: int) -> None:
    span = LAYOUT.frames[frame]
    words = weights.live.read(span).copy()
    words[0] ^= 1
    weights.live.write(span, words)


@pytest.mark.parametrize("encoded", [DELTA, KEYFRAME], ids=["delta", "keyframe"])
def test_the_live_words_are_those_of_the_base_until_they_are_all_those_of_the_version(
    mode: str, weights: LiveTensors, encoded: EncodedVersion
) -> None:
    version = begun(mode, weights, encoded)
    put_all(version, encoded)
    np.testing.assert_array_equal(words_of(weights.live), BASE.words)
    version.apply()
    np.testing.assert_array_equal(words_of(weights.live), WANTED.words)


def test_a_chain_from_the_public_base_model_starts_from_what_is_on_disk_and_not_from_what_is_live(
    mode: str, weights: LiveTensors
) -> None:
    # Version 2 has all but one frame from version 0, unchanged; live is version 1.
    words = LEARNER.versions[0].words.copy()
    words[LAYOUT.frames[1].start_word] ^= 3
    learner = Learner(key=LEARNER.key, versions={0: LEARNER.versions[0]})
    learner.versions[1] = learner.versions[2] = HeldPolicy.of(2, words, layout=LAYOUT)
    encoded = learner.encode(2, 0)
    assert [frame for frame, record in enumerate(encoded.manifest.frames) if record.payload_bytes] == [1]
    public = ArrayWords(LEARNER.versions[0].words)
    version = begun(mode, weights, encoded, held=LEARNER.versions[0].version, base=public)
    put_all(version, encoded)
    version.apply()
    np.testing.assert_array_equal(words_of(weights.live), words)


def test_a_damaged_payload_is_found_and_changes_nothing(mode: str, weights: LiveTensors) -> None:
    version = begun(mode, weights)
    bad = bytearray(DELTA.payloads[1])
    bad[7] ^= 16
    with pytest.raises(DamagedFrameError) as damaged:
        version.put(1, bytes(bad))
    assert damaged.value.frame == 1
    with refused(Reason.DAMAGED, "5"):
        version.finish()
    np.testing.assert_array_equal(words_of(weights.live), BASE.words)
    put_all(version, DELTA)
    version.apply()
    np.testing.assert_array_equal(words_of(weights.live), WANTED.words)


def test_a_frame_that_is_wrong_in_memory_is_found_in_its_frame_alone(mode: str, weights: LiveTensors) -> None:
    spoil(weights, 2)
    version = begun(mode, weights)
    assert version.take_held() == ()
    for frame in (0, 1, 3, 4):
        version.put(frame, DELTA.payloads[frame])
    with pytest.raises(WrongBaseError) as wrong:
        version.put(2, DELTA.payloads[2])
    assert wrong.value.frame == 2
    assert version.missing() == (2,)


def test_a_wrong_base_is_found_where_nothing_changed(mode: str, weights: LiveTensors) -> None:
    learner = Learner()
    words = BASE.words.copy()
    words[LAYOUT.frames[0].start_word] ^= 1
    learner.versions[1], learner.versions[2] = BASE, HeldPolicy.of(2, words, layout=LAYOUT)
    spoil(weights, 3)
    version = begun(mode, weights, learner.encode(2, 1))
    assert version.missing() == (0,)
    assert version.take_held() == (3,)


def test_a_keyframe_of_what_is_held_needs_no_payload(mode: str, weights: LiveTensors) -> None:
    version = begun(mode, weights, LEARNER.encode(1, None))
    assert version.take_held() == ()
    assert version.missing() == ()
    version.finish()


def test_another_layout_is_refused_before_anything_is_allocated(weights: LiveTensors) -> None:
    with refused(Reason.LAYOUT_MISMATCH):
        begun("in place", weights, Learner(layout=Layout.of(SPECS, frame_words=512)).encode(1, None))


def test_a_delta_does_not_start_from_anything_but_its_base(mode: str, weights: LiveTensors) -> None:
    for held in (LEARNER.versions[0].version, PolicyVersion(1, b"x" * 16)):
        with refused(Reason.WRONG_BASE):
            begun(mode, weights, held=held)


def test_a_delta_from_another_version_0_says_that_the_model_is_not_the_runs(
    mode: str, weights: LiveTensors
) -> None:
    with refused(Reason.BASE_MISMATCH, "model_dir", "version 0", "version 1"):
        begun(mode, weights, LEARNER.encode(1, 0), held=PolicyVersion(0, b"x" * 16))


def test_in_place_a_payload_that_rots_before_it_is_applied_is_never_applied(
    weights: LiveTensors, tmp_path: Path
) -> None:
    version = begun("in place", weights, payloads=logged(tmp_path, DELTA))
    put_all(version, DELTA)
    flip_bit(tmp_path / "2-1" / "frames", len(DELTA.payloads[0]))
    with naming(DamagedFrameError, "frame 1") as torn:
        version.apply()
    assert torn.value.reason is Reason.DAMAGED


def test_in_place_a_base_that_changes_before_a_frame_is_applied_is_found(weights: LiveTensors) -> None:
    version = begun("in place", weights)
    put_all(version, DELTA)
    spoil(weights, 3)
    with pytest.raises(WrongBaseError) as torn:
        version.apply()
    assert torn.value.frame == 3


def test_in_the_spare_copy_words_that_change_after_they_were_verified_are_found_by_the_scrub(
    weights: LiveTensors,
) -> None:
    version, scrub = begun("spare", weights), MemoryScrub(LAYOUT)
    put_all(version, DELTA)
    assert version.spare is not None
    span = LAYOUT.frames[4]
    words = version.spare.read(span).copy()
    words[-1] ^= 1
    version.spare.write(span, words)
    version.apply()
    scrub.expect(version.digests)
    assert scrub.check_next(weights.live) == 4


def test_frames_as_signed_are_no_version_of_another_root(mode: str, weights: LiveTensors) -> None:
    other = EncodedVersion(replace(DELTA.manifest, root=bytes(16)), DELTA.payloads)
    with refused(Reason.DAMAGED, "version 2"):
        put_all(begun(mode, weights, other), other)


def test_two_copies_are_enough_for_a_chain(weights: LiveTensors) -> None:
    spare: ModelWords | None = weights.new_spare()
    copies, held = {id(weights.live), id(spare)}, BASE.version
    for number in (2, 3, 4):
        encoded = LEARNER.encode(number, number - 1)
        version = VersionAssembly(
            encoded.manifest,
            layout=LAYOUT,
            weights=weights,
            base=weights.live,
            base_version=held,
            payloads=None,
            spare=spare,
        )
        put_all(version, encoded)
        version.apply()
        spare, held = version.spare, encoded.manifest.policy_version
        assert {id(weights.live), id(spare)} == copies
    np.testing.assert_array_equal(words_of(weights.live), LEARNER.versions[4].words)
