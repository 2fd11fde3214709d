"""Every dtype, told by bits, against what torch and numpy make of the same bits."""

import numpy as np
import pytest
import torch
import zstandard

from bench.held_policy import HeldPolicy
from bench.whole_versions import encode_version
from node.errors import Reason
from node.weights.codec.frame_codec import encode_frame
from node.weights.format.digests import Words, words_digest
from node.weights.format.dtypes import DTYPES, Dtype
from node.weights.format.layout import Layout, TensorSpec
from node.weights.format.manifest import Codec
from support.refusals import refused
from support.weights import RUN_ID

FLOATING = [dtype for dtype in DTYPES.values() if dtype.is_floating]
FLOAT32 = DTYPES["float32"]


def words_of(array: np.ndarray) -> Words:
    return np.frombuffer(array.tobytes(), np.uint16).copy()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_torch_has_every_dtype_as_wide_as_we_say(dtype: Dtype) -> None:
    assert getattr(torch, dtype.name).itemsize == dtype.element_bytes
    assert getattr(torch, dtype.name).is_floating_point == dtype.is_floating


@pytest.mark.parametrize("dtype", FLOATING, ids=lambda dtype: dtype.name)
def test_what_is_no_number_is_what_torch_says_is_none(dtype: Dtype) -> None:
    random = np.random.default_rng(0)
    if dtype.element_bytes <= 2:
        bits = np.arange(1 << 8 * dtype.element_bytes).astype(f"<u{dtype.element_bytes}")
    else:
        bits = random.integers(0, 1 << 63, 2000, np.uint64).astype(f"<u{dtype.element_bytes}")
        with np.errstate(all="ignore"):
            special = np.array([np.inf, -np.inf, np.nan, 0, 1e-300, -1]).astype(f"<f{dtype.element_bytes}")
        bits[:6] = special.view(bits.dtype)
    values = torch.from_numpy(bits.view(np.uint8)).view(getattr(torch, dtype.name))
    finite = values.double().isfinite().numpy()
    assert not finite.all()
    if dtype.element_bytes == 1:
        bits, finite = np.repeat(bits, 2), np.repeat(finite, 2)  # a word holds two elements
    places, at = [], 0
    while (found := dtype.first_not_finite(words_of(bits[at:]))) is not None:
        places.append(at + found)
        at += found + (2 if dtype.element_bytes == 1 else 1)
    assert places == np.flatnonzero(~finite)[:: 2 if dtype.element_bytes == 1 else 1].tolist()


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if not d.is_floating], ids=lambda d: d.name)
def test_every_integer_is_a_number(dtype: Dtype) -> None:
    assert dtype.first_not_finite(np.full(8, 0xFFFF, np.uint16)) is None


def test_planes_are_as_documented() -> None:
    words = words_of(np.tile(np.array([0x04030201, 0x14131211], "<u4"), 50))
    frame = encode_frame(words, base=None, dtype=FLOAT32)
    assert frame.codec is Codec.PLANES
    expected = bytes([1, 0x11] * 50 + [2, 0x12] * 50 + [3, 0x13] * 50 + [4, 0x14] * 50)
    assert zstandard.decompress(frame.payload) == expected


def test_planes_of_steps_are_as_documented() -> None:
    base = np.full(100, 0x00FF_FFFF, "<u4")
    new = base.copy()
    new[[2, 3, 4]] += np.array([1, 0xFFFF_FFFF, 0x8000_0000], np.uint32)
    frame = encode_frame(words_of(new), base=words_of(base), dtype=FLOAT32)
    assert frame.codec is Codec.STEP_PLANES
    # Steps +1, -1, -2^31 are zigzag 2, 1, 2^32 - 1.
    planes = np.frombuffer(zstandard.decompress(frame.payload), np.uint8).reshape(4, 100)
    assert planes[:, :6].tolist() == [
        [0, 0, 2, 1, 255, 0],
        [0, 0, 0, 0, 255, 0],
        [0, 0, 0, 0, 255, 0],
        [0, 0, 0, 0, 255, 0],
    ]
    assert not planes[:, 6:].any()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float8_e4m3fn", "int8", "int32", "int64", "bool"])
def test_a_small_step_of_any_width_is_small_and_none_costs_nothing(dtype: str) -> None:
    random = np.random.default_rng(1)
    base = random.integers(0, 1 << 16, 4000).astype(np.uint16)
    new = base.copy()
    new[::97] ^= 1
    frame = encode_frame(new, base=base, dtype=DTYPES[dtype])
    assert frame.codec is Codec.STEP_PLANES
    assert len(frame.payload) < 0.1 * new.nbytes
    assert encode_frame(base, base=base.copy(), dtype=DTYPES[dtype]).codec is Codec.UNCHANGED
    assert encode_frame(base, base=None, dtype=DTYPES[dtype]).codec is Codec.RAW


def test_float16_is_coded_as_words_and_checked_as_what_it_is() -> None:
    random = np.random.default_rng(2)
    values = random.normal(0, 0.02, 5000).astype(np.float16)
    base, new = words_of(values), words_of(values)
    new[::50] += np.uint16(1)
    frame = encode_frame(new, base=base, dtype=DTYPES["float16"])
    assert frame.codec is Codec.EXPONENT_CONDITIONED
    assert (frame.digest, frame.is_finite) == (words_digest(new), True)
    # 0x7C00 is infinity here and a number in bfloat16; 0x7F80 is the other way round, and here a NaN too.
    for word, dtype, is_finite in (
        (0x7C00, "float16", False),
        (0x7C00, "bfloat16", True),
        (0x7F80, "int16", True),
    ):
        new[700] = word
        for held in (base, new.copy(), None):
            assert encode_frame(new, base=held, dtype=DTYPES[dtype]).is_finite is is_finite


@pytest.mark.parametrize(
    ("name", "element", "bits"),
    [
        ("router", 3, 0x7F80_0000),
        ("router", 0, 0xFFFF_FFFF),
        ("scale", 4, 0x7F),
        ("half", 1, 0xFC00),
        ("norm", 6, 0x7FC0),
    ],
)
def test_the_tensor_and_element_that_is_no_number_are_named_whatever_the_dtype(
    name: str, element: int, bits: int
) -> None:
    layout = Layout.of(
        [
            TensorSpec("norm", (9,)),
            TensorSpec("router", (5,), "float32"),
            TensorSpec("count", (4,), "int32"),
            TensorSpec("scale", (5,), "float8_e4m3fn"),
            TensorSpec("half", (3,), "float16"),
        ],
        frame_words=6,
    )
    words = np.zeros(layout.words, np.uint16)
    for tensor in layout.tensors:
        if tensor.name == "count":
            words[tensor.start_word :][: tensor.words] = 0xFFFF
        if tensor.name == name:
            part = words[tensor.start_word :][: tensor.words].view(f"<u{tensor.dtype.element_bytes}")
            part[element] = bits
    base = HeldPolicy.of(0, np.zeros(layout.words, np.uint16), layout=layout)
    with refused(Reason.NON_FINITE, f"'{name}'", str(element)):
        encode_version(
            words, version=1, base=base, layout=layout, run_id=RUN_ID, learner_epoch=1, published_at_s=0.0
        )
