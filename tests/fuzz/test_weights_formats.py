"""Good zstd frames of bytes from strangers: refused or read, never anything else."""

import contextlib

import numpy as np
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from node.errors import RefusedError
from node.weights.codec.frame_codec import decode_frame
from node.weights.format.dtypes import DTYPES
from node.weights.format.manifest import Codec
from support.weights import random_words

WORDS = 500
BASE = random_words(7)[:WORDS]


@settings(max_examples=400)
@given(
    codec=st.sampled_from([Codec.PLANES, Codec.STEP_PLANES, Codec.KEYFRAME]),
    plain=st.one_of(st.binary(max_size=200), st.binary(min_size=8, max_size=8).map(lambda b: WORDS // 4 * b)),
    dtype=st.sampled_from(["int8", "bfloat16", "float32", "int64"]),
)
def test_any_bytes_in_a_good_zstd_frame_decode_or_are_refused(codec: Codec, plain: bytes, dtype: str) -> None:
    """They go into the middle of a larger array: nothing beside it may change."""
    room, base = np.full(WORDS + 200, 0xABCD, np.uint16), BASE.copy()
    payload = (bytes(WORDS) if codec is Codec.KEYFRAME else b"") + zstandard.compress(plain)
    with contextlib.suppress(RefusedError):
        decode_frame(codec, payload, base=base, out=room[100:-100], dtype=DTYPES[dtype])
    assert (room[:100] == 0xABCD).all()
    assert (room[-100:] == 0xABCD).all()
    np.testing.assert_array_equal(base, BASE)
