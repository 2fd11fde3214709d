"""A flipped bit in the live words is found within one pass, whichever it is."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sampler.engines.words.model_words import ArrayWords, frame_digests
from sampler.versions.held_version import MemoryScrub
from support.model_words import live_words, words_of
from support.weights import LAYOUT, random_words

FRAMES = len(LAYOUT.frames)


def scrub_of(live: ArrayWords, *, turn_words: int = 1) -> MemoryScrub:
    scrub = MemoryScrub(LAYOUT, turn_words=turn_words)
    scrub.expect(frame_digests(live, LAYOUT.frames))
    return scrub


@given(word=st.integers(0, LAYOUT.words - 1), bit=st.integers(0, 15), turns_before=st.integers(0, FRAMES))
def test_any_flipped_bit_is_found_within_as_many_turns_as_there_are_frames(
    word: int, bit: int, turns_before: int
) -> None:
    live = ArrayWords(random_words(1))
    scrub = scrub_of(live)
    for _ in range(turns_before):
        assert scrub.check_next(live) is None
    live.words[word] ^= np.uint16(1 << bit)
    found = [frame for _ in range(FRAMES) if (frame := scrub.check_next(live)) is not None]
    (frame,) = [n for n, span in enumerate(LAYOUT.frames) if span.slice.start <= word < span.slice.stop]
    assert found == [frame]


@pytest.mark.parametrize("bit", [0, 15, 16, 31])
def test_a_bit_that_flips_in_a_float32_value_is_found_wherever_it_is(bit: int) -> None:
    words = random_words(1)
    weights = live_words(words, dtype=torch.float32)
    scrub = MemoryScrub(LAYOUT)
    scrub.expect(frame_digests(weights.live, LAYOUT.frames))
    np.testing.assert_array_equal(words_of(weights.live), words)
    weights.live.flat.view(torch.int32)[4] ^= -(1 << 31) if bit == 31 else 1 << bit
    assert scrub.check_next(weights.live) == 0


def test_a_turn_looks_at_as_many_words_as_it_may_and_at_none_twice() -> None:
    live = ArrayWords(random_words(1))
    looked: list[int] = []

    class Looking(ArrayWords):
        def read(self, frame):  # type: ignore[no-untyped-def]
            looked.append(LAYOUT.frames.index(frame))
            return super().read(frame)

    half = scrub_of(live, turn_words=LAYOUT.frames[0].words + 1)
    half.check_next(Looking(live.words))
    assert looked == [0, 1]
    half.check_next(Looking(live.words))
    assert looked[2:] == [2, 3]
    looked.clear()
    scrub_of(live, turn_words=10 * LAYOUT.words).check_next(Looking(live.words))
    assert looked == list(range(FRAMES))


def test_another_version_is_expected_once_it_was_verified() -> None:
    live = ArrayWords(random_words(1))
    scrub = scrub_of(live, turn_words=LAYOUT.words)
    live.words[:] = random_words(2)
    assert scrub.check_next(live) == 0
    scrub.expect(frame_digests(live, LAYOUT.frames))
    assert scrub.check_next(live) is None
