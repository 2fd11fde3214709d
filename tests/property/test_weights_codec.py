"""Whatever the words are, they come back bit for bit."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from node.weights.codec.frame_codec import decode_frame, encode_frame
from node.weights.format.digests import Words
from node.weights.format.dtypes import DTYPES
from node.weights.format.manifest import Codec, payload_limit

WORDS = hnp.arrays(np.uint16, st.integers(1, 600))


@st.composite
def base_and_new(draw: st.DrawFn) -> tuple[Words, Words]:
    """Draw words of any bits and a change of any density and size, at any alignment."""
    start = draw(st.integers(0, 3))
    base: Words = draw(WORDS)
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    share = draw(st.sampled_from([0.0, 0.002, 0.01, 0.1, 0.5, 1.0]))
    largest = draw(st.sampled_from([1, 2, 200, 0x8000]))
    shifted = np.concatenate([np.zeros(start, np.uint16), base])[start:]
    new = shifted.copy()
    moved = np.flatnonzero(random.random(base.size) < share)
    new[moved] += random.integers(-largest, largest, moved.size, endpoint=True).astype(np.uint16)
    return shifted, new


@settings(max_examples=120)
@given(pair=base_and_new(), dtype=st.sampled_from(sorted(DTYPES)))
def test_a_frame_of_any_dtype_comes_back_bit_for_bit(pair: tuple[Words, Words], dtype: str) -> None:
    whole = pair[0].size // 4 * 4
    base, new = pair[0][:whole], pair[1][:whole]
    if not whole:
        return
    for held in (base, None):
        frame = encode_frame(new, base=held, dtype=DTYPES[dtype])
        assert len(frame.payload) <= payload_limit(frame.codec, new.size)
        assert (frame.codec is Codec.UNCHANGED) == (held is not None and np.array_equal(base, new))
        out = np.full(new.size, 0xABCD, np.uint16)
        decode_frame(frame.codec, frame.payload, base=held, out=out, dtype=DTYPES[dtype])
        np.testing.assert_array_equal(out, new)
