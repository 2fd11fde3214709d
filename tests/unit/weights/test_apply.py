"""Bit-exact or not at all, and doubt costs one frame."""

from dataclasses import replace

import numpy as np
import pytest

from bench.whole_versions import EncodedVersion, WholeVersion
from node.errors import Reason, RefusedError
from node.policy import PolicyVersion
from node.weights.assembly.apply import WrongBaseError
from node.weights.assembly.held import HeldPolicy
from node.weights.assembly.merge import rebuild_frame
from node.weights.format.layout import Layout
from node.weights.format.manifest import DamagedFrameError
from support.weights import LAYOUT, SPECS, Learner

LEARNER = Learner()
DELTA = LEARNER.encode(2, 1)
KEYFRAME = LEARNER.encode(2, None)
BASE = LEARNER.versions[1]
WANTED = LEARNER.versions[2]


def staged(encoded: EncodedVersion, base: HeldPolicy | None) -> WholeVersion:
    return WholeVersion(encoded.manifest, layout=LAYOUT, base=base)


def put_all(stage: WholeVersion, encoded: EncodedVersion) -> HeldPolicy:
    assert stage.take_held() == ()
    for frame in stage.missing():
        stage.put(frame, encoded.payloads[frame])
    return stage.finish()


def wrong_in(frame: int) -> HeldPolicy:
    """Return the base with one bit wrong in one frame: it still claims to be itself."""
    words = BASE.words.copy()
    words[LAYOUT.frames[frame].start_word] ^= 1
    return HeldPolicy(BASE.version, words)


@pytest.mark.parametrize("base", [BASE, None, LEARNER.versions[0]], ids=["its base", "nothing", "another"])
def test_a_keyframe_makes_the_version_from_anything(base: HeldPolicy | None) -> None:
    policy = put_all(staged(KEYFRAME, base), KEYFRAME)
    assert policy.version == WANTED.version
    np.testing.assert_array_equal(policy.words, WANTED.words)


def test_a_delta_makes_the_version_from_its_base_and_leaves_the_base_alone() -> None:
    before = BASE.words.copy()
    policy = put_all(staged(DELTA, BASE), DELTA)
    np.testing.assert_array_equal(policy.words, WANTED.words)
    np.testing.assert_array_equal(BASE.words, before)


def test_a_chain_takes_two_arrays() -> None:
    held, spare = HeldPolicy(BASE.version, BASE.words.copy()), np.empty_like(BASE.words)
    arrays = {id(held.words), id(spare)}
    for version in (2, 3, 4):
        encoded = LEARNER.encode(version, version - 1)
        stage = WholeVersion(encoded.manifest, layout=LAYOUT, base=held, spare=spare)
        spare, held = held.words, put_all(stage, encoded)
        assert {id(held.words), id(spare)} == arrays
    assert held.version == LEARNER.versions[4].version


@pytest.mark.parametrize(
    "base",
    [None, LEARNER.versions[0], replace(BASE, version=PolicyVersion(1, b"x" * 16))],
    ids=["nothing", "an older version", "a version of that number with another root"],
)
def test_a_delta_does_not_start_from_anything_but_its_base(base: HeldPolicy | None) -> None:
    with pytest.raises(RefusedError) as refused:
        staged(DELTA, base)
    assert refused.value.reason is Reason.WRONG_BASE


def test_another_layout_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(RefusedError) as refused:
        WholeVersion(DELTA.manifest, layout=Layout.of(SPECS, frame_words=512), base=None)
    assert refused.value.reason is Reason.LAYOUT_MISMATCH


def test_a_damaged_payload_is_found_and_the_good_one_is_taken_afterwards() -> None:
    stage = staged(DELTA, BASE)
    bad = bytearray(DELTA.payloads[1])
    bad[7] ^= 16
    with pytest.raises(DamagedFrameError) as damaged:
        stage.put(1, bytes(bad))
    assert damaged.value.frame == 1
    assert 1 in stage.missing()
    assert put_all(stage, DELTA).version == WANTED.version


def test_a_payload_put_twice_is_applied_once() -> None:
    stage = staged(DELTA, BASE)
    stage.put(0, DELTA.payloads[0])
    stage.put(0, DELTA.payloads[0])
    np.testing.assert_array_equal(put_all(stage, DELTA).words, WANTED.words)


def test_a_delta_applied_to_its_own_result_changes_nothing() -> None:
    applied_already = HeldPolicy(BASE.version, WANTED.words)
    stage = staged(DELTA, applied_already)
    np.testing.assert_array_equal(put_all(stage, DELTA).words, WANTED.words)


def test_a_keyframe_of_what_is_held_needs_no_payload() -> None:
    stage = staged(KEYFRAME, WANTED)
    assert stage.take_held() == ()
    assert stage.missing() == ()
    np.testing.assert_array_equal(stage.finish().words, WANTED.words)


def test_a_wrong_base_is_found_in_its_frame_alone() -> None:
    stage = staged(DELTA, wrong_in(2))
    assert stage.take_held() == ()
    for frame in (0, 1, 3, 4):
        stage.put(frame, DELTA.payloads[frame])
    with pytest.raises(WrongBaseError) as wrong:
        stage.put(2, DELTA.payloads[2])
    assert wrong.value.frame == 2
    assert stage.missing() == (2,)


def test_a_wrong_base_is_found_where_nothing_changed() -> None:
    learner = Learner()
    words = learner.words(0).copy()
    words[LAYOUT.frames[0].start_word] ^= 1
    learner.versions[1] = HeldPolicy.of(1, words, layout=LAYOUT)
    encoded = learner.encode(1, 0)
    held = learner.versions[0].words.copy()
    held[LAYOUT.frames[3].start_word] ^= 1
    stage = staged(encoded, HeldPolicy(learner.versions[0].version, held))
    assert stage.missing() == (0,)
    assert stage.take_held() == (3,)


def test_a_version_is_not_finished_while_a_frame_is_missing() -> None:
    stage = staged(DELTA, BASE)
    stage.take_held()
    for frame in stage.missing()[:-1]:
        stage.put(frame, DELTA.payloads[frame])
    with pytest.raises(RefusedError, match="lacks 1 frames"):
        stage.finish()


def test_words_that_change_after_they_were_verified_are_found() -> None:
    spare = np.empty_like(BASE.words)
    stage = WholeVersion(DELTA.manifest, layout=LAYOUT, base=BASE, spare=spare)
    for frame, payload in enumerate(DELTA.payloads):
        stage.put(frame, payload)
    spare[-1] ^= 1
    with pytest.raises(RefusedError, match="are not those signed") as refused:
        stage.finish()
    assert refused.value.reason is Reason.DAMAGED


def test_a_frame_is_rebuilt_along_a_chain() -> None:
    steps = [LEARNER.encode(1, None), LEARNER.encode(2, 1), LEARNER.encode(4, 2)]
    for frame, span in enumerate(LAYOUT.frames):
        words = rebuild_frame(frame, [(each.manifest, each.payloads[frame]) for each in steps], layout=LAYOUT)
        np.testing.assert_array_equal(words, LEARNER.words(4)[span.slice])


def test_a_frame_is_not_rebuilt_across_a_hole_or_from_a_damaged_payload() -> None:
    first, last = LEARNER.encode(1, None), LEARNER.encode(4, 2)
    with pytest.raises(WrongBaseError):
        rebuild_frame(
            0, [(first.manifest, first.payloads[0]), (last.manifest, last.payloads[0])], layout=LAYOUT
        )
    with pytest.raises(DamagedFrameError):
        rebuild_frame(0, [(first.manifest, first.payloads[1])], layout=LAYOUT)


def test_a_payload_that_is_signed_but_makes_other_words_is_damaged() -> None:
    other = replace(KEYFRAME.manifest.frames[0], new_check=1)
    manifest = replace(KEYFRAME.manifest, frames=(other, *KEYFRAME.manifest.frames[1:]))
    stage = WholeVersion(manifest, layout=LAYOUT, base=None)
    with pytest.raises(DamagedFrameError, match="words decoded"):
        stage.put(0, KEYFRAME.payloads[0])


def test_a_delta_that_was_signed_for_other_words_makes_no_version() -> None:
    other = replace(DELTA.manifest.frames[2], new_check=1)
    manifest = replace(DELTA.manifest, frames=(*DELTA.manifest.frames[:2], other, *DELTA.manifest.frames[3:]))
    stage = WholeVersion(manifest, layout=LAYOUT, base=BASE)
    with pytest.raises(WrongBaseError, match="frame 2: the held words do not make version 2: the words"):
        stage.put(2, DELTA.payloads[2])
    assert stage.missing() == (0, 1, 2, 3, 4)
