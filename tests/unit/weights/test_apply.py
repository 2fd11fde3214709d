"""A frame's words from its payload: those that were signed, or what is at fault."""

from dataclasses import replace

import numpy as np
import pytest

from bench.whole_versions import EncodedVersion
from node.weights.assembly.apply import WrongBaseError, make_frame
from node.weights.assembly.stored import rebuild_frame
from node.weights.format.digests import Words, words_digest
from node.weights.format.manifest import DamagedFrameError, Manifest
from support.refusals import naming
from support.weights import LAYOUT, Learner

LEARNER = Learner()
DELTA = LEARNER.encode(2, 1)
KEYFRAME = LEARNER.encode(2, None)
SPAN = LAYOUT.frames[2]
BASE, WANTED = (LEARNER.versions[number].words[SPAN.slice] for number in (1, 2))


def made(manifest: Manifest, payload: bytes, *, base: Words | None) -> Words:
    """Return the words of frame 2."""
    out = np.empty(SPAN.words, np.uint16)
    assert make_frame(2, manifest, payload, base=base, out=out, dtype=SPAN.dtype) == words_digest(out)
    return out


@pytest.mark.parametrize(
    ("encoded", "base"),
    [(DELTA, BASE), (KEYFRAME, BASE), (KEYFRAME, None), (DELTA, WANTED)],
    ids=["a delta", "a keyframe", "a keyframe from nothing", "a delta on its own result"],
)
def test_the_signed_words_are_made_and_the_base_is_left_alone(
    encoded: EncodedVersion, base: Words | None
) -> None:
    before = BASE.copy()
    np.testing.assert_array_equal(made(encoded.manifest, encoded.payloads[2], base=base), WANTED)
    np.testing.assert_array_equal(BASE, before)


def test_a_payload_that_was_not_signed_is_damaged() -> None:
    bad = bytearray(DELTA.payloads[2])
    bad[7] ^= 16
    for payload in (bytes(bad), DELTA.payloads[2][:-1], DELTA.payloads[1]):
        with naming(DamagedFrameError, "frame 2") as damaged:
            made(DELTA.manifest, payload, base=BASE)
        assert damaged.value.frame == 2


def test_a_base_with_a_wrong_word_is_found() -> None:
    with pytest.raises(WrongBaseError) as wrong:
        made(DELTA.manifest, DELTA.payloads[2], base=BASE ^ np.uint16(1))
    assert wrong.value.frame == 2


def test_a_payload_that_is_signed_but_makes_other_words_is_damaged_or_its_base_is_wrong() -> None:
    def signed_for_others(encoded: EncodedVersion) -> Manifest:
        frames = list(encoded.manifest.frames)
        frames[2] = replace(frames[2], new_check=1)
        return replace(encoded.manifest, frames=tuple(frames))

    with naming(DamagedFrameError, "frame 2"):
        made(signed_for_others(KEYFRAME), KEYFRAME.payloads[2], base=None)
    with naming(WrongBaseError, "frame 2", "version 2"):
        made(signed_for_others(DELTA), DELTA.payloads[2], base=BASE)


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
