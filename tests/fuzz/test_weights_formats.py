"""Bytes from strangers: refused or right, never anything else."""

import contextlib

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from node.errors import RefusedError
from node.weights.codec.frame_codec import decode_frame, encode_frame, encode_planes, encode_step_planes
from node.weights.format.dtypes import DTYPES
from node.weights.format.manifest import Codec, parse, verify_signed
from support.weights import RUN_ID, Learner, drifted, random_words

LEARNER = Learner()
DELTA = LEARNER.encode(2, 1)
KEYFRAME = LEARNER.encode(2, None)
SIGNED = LEARNER.signed(2, 1)[0]
WORDS = 500
BASE = random_words(7)[:WORDS]
MOVED = drifted(BASE, 8, share=0.05)
GOOD = [
    (Codec.EXPONENT_CONDITIONED, encode_frame(MOVED, base=BASE).payload),
    (Codec.KEYFRAME, encode_frame(BASE, base=None).payload),
    (Codec.PLANES, encode_planes(MOVED, element_bytes=4)),
    (Codec.STEP_PLANES, encode_step_planes(MOVED, base=BASE, element_bytes=4)),
]

CODECS = st.sampled_from(list(Codec))
WIDTHS = ("int8", "bfloat16", "float32", "int64")


def decode(codec: Codec, payload: bytes, dtype: str = "bfloat16") -> None:
    """Decode into the middle of a larger array: nothing beside it may change."""
    room = np.full(WORDS + 200, 0xABCD, np.uint16)
    base = BASE.copy()
    with contextlib.suppress(RefusedError):
        decode_frame(codec, payload, base=base, out=room[100:-100], dtype=DTYPES[dtype])
    assert (room[:100] == 0xABCD).all()
    assert (room[-100:] == 0xABCD).all()
    np.testing.assert_array_equal(base, BASE)


@settings(max_examples=200)
@given(codec=CODECS, payload=st.binary(max_size=2 * WORDS + 10), dtype=st.sampled_from(WIDTHS))
def test_any_bytes_decode_or_are_refused(codec: Codec, payload: bytes, dtype: str) -> None:
    decode(codec, payload, dtype)


@settings(max_examples=300)
@given(
    codec=st.sampled_from([Codec.PLANES, Codec.STEP_PLANES]),
    plain=st.one_of(st.binary(max_size=60), st.binary(min_size=8, max_size=8).map(lambda b: WORDS // 4 * b)),
    dtype=st.sampled_from(WIDTHS),
)
def test_any_planes_in_a_good_zstd_frame_decode_or_are_refused(
    codec: Codec, plain: bytes, dtype: str
) -> None:
    decode(codec, zstandard.compress(plain), dtype)


@settings(max_examples=200)
@given(plain=st.binary(max_size=200))
def test_any_exponents_in_a_good_zstd_frame_decode_or_are_refused(plain: bytes) -> None:
    decode(Codec.KEYFRAME, bytes(WORDS) + zstandard.compress(plain))


@settings(max_examples=200)
@given(
    good=st.sampled_from(GOOD),
    changes=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.integers(0, 1 << 16),
)
def test_a_damaged_good_payload_decodes_to_something_or_is_refused(
    good: tuple[Codec, bytes], changes: list[tuple[int, int]], cut: int
) -> None:
    codec, payload = good[0], bytearray(good[1])
    dtype = "float32" if codec in (Codec.PLANES, Codec.STEP_PLANES) else "bfloat16"
    for position, value in changes:
        payload[position % len(payload)] = value
    decode(codec, bytes(payload), dtype)
    decode(codec, bytes(payload[: cut % len(payload)]), dtype)


def test_every_cut_of_a_signed_manifest_is_found() -> None:
    for size in range(len(SIGNED)):
        with pytest.raises(RefusedError):
            verify_signed(SIGNED[:size], public_key=LEARNER.key.public_key, run_id=RUN_ID)


@settings(max_examples=200)
@given(st.binary(max_size=400))
def test_any_bytes_are_no_manifest_or_a_canonical_one(message: bytes) -> None:
    try:
        manifest = parse(message)
    except RefusedError:
        return
    assert manifest.to_bytes() == message


@settings(max_examples=300)
@given(
    good=st.sampled_from([DELTA.manifest.to_bytes(), KEYFRAME.manifest.to_bytes()]),
    changes=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, 40),
)
def test_a_changed_manifest_is_refused_or_canonical(
    good: bytes, changes: list[tuple[int, int]], cut: int
) -> None:
    message = bytearray(good)
    for position, value in changes:
        message[position % len(message)] = value
    changed = bytes(message[: len(message) - cut])
    try:
        manifest = parse(changed)
    except RefusedError:
        return
    assert manifest.to_bytes() == changed
