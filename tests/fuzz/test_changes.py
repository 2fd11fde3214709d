"""Payloads of changes from strangers: read or refused, and never more memory than the shapes take."""

import contextlib
import dataclasses
import random
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
import zstandard

from bench.shared.fed_back_encoder import FedBackEncoder
from learner.merging.changes.coder import decode_tensors
from learner.merging.changes.payload_parts import PayloadReader
from learner.merging.changes.word_changes import WordsBefore
from learner.merging.merge_settings import Compression, MergeSettings
from node.weights.format.digests import Words
from node.weights.format.manifest import Codec
from support.changes import COMPRESSIONS, SHAPES, drawn, merge_settings, words_of

BASE = words_of(drawn(3))


def payload_of(compression: Compression) -> bytes:
    scale = 1e-2 if compression == "word_changes" else 1.0
    encoder = FedBackEncoder(merge_settings(compression), SHAPES)
    return encoder.encode(drawn(4, scale=scale), words_before=BASE)


def read(payload: bytes, rules: MergeSettings, before: WordsBefore | None = BASE) -> None:
    """Decode to the end; what is yielded is whole and finite."""
    for name, change in decode_tensors(payload, rules, SHAPES, words_before=before):
        assert change.shape == SHAPES[name]
        assert change.dtype == torch.float64
        assert change.isfinite().all()


def is_refused(action: Callable[..., object], *arguments: object, **named: object) -> bool:
    try:
        action(*arguments, **named)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_broken_payloads_are_read_or_a_value_error(compression: Compression) -> None:
    payload, source = payload_of(compression), random.Random(0)
    read(payload, merge_settings(compression))
    for _ in range(600):
        broken = bytearray(payload)
        for _ in range(source.choice((1, 1, 2, 8))):
            broken[source.randrange(len(broken))] ^= 1 << source.randrange(8)
        with contextlib.suppress(ValueError):
            read(bytes(broken), merge_settings(compression))
    for _ in range(200):
        begins = source.randrange(len(payload))
        with contextlib.suppress(ValueError):
            read(payload[:begins] + source.randbytes(source.randrange(200)), merge_settings(compression))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_cut_or_longer_payloads_and_those_of_others_are_refused(compression: Compression) -> None:
    payload = payload_of(compression)
    for size in {0, 1, 5, 6, 7, *range(8, len(payload), 1 + len(payload) // 200), len(payload) - 1}:
        assert is_refused(read, payload[:size], merge_settings(compression))
    for longer in (b"\0", b"\0\0\0\0", payload):
        assert is_refused(read, payload + longer, merge_settings(compression))
    for other in COMPRESSIONS:
        if other != compression:
            assert is_refused(read, payload, merge_settings(other))


def test_of_a_named_tensor_that_the_model_does_not_have() -> None:
    payload = bytearray(payload_of("full"))
    payload[6] |= 0x01  # four names, so that the last four bits name nothing
    assert is_refused(read, bytes(payload), merge_settings("full"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_what_is_not_finite_is_neither_coded_nor_read(compression: Compression, value: float) -> None:
    encoder, change = FedBackEncoder(merge_settings(compression), SHAPES), drawn(5)
    change["embedding"][2, 3] = value
    assert is_refused(encoder.encode, change, words_before=BASE)
    plain = np.full(64, value, np.float32).tobytes()
    reader = PayloadReader(struct.pack("<I", Codec.RAW | len(plain) << 4) + plain)
    assert is_refused(reader.array, np.float32, 64)


def test_a_change_of_other_names_or_shapes_is_not_coded() -> None:
    encoder = FedBackEncoder(merge_settings("four_bit"), SHAPES)
    for change in ({"other": torch.zeros(7)}, {"bias": torch.zeros(8)}):
        assert is_refused(encoder.encode, change)


@pytest.mark.parametrize("content", [1 << 28, 0])
def test_a_bomb_is_refused_before_it_is_unpacked(content: int) -> None:
    """Its frame says, or does not say, that it has 256 MiB: it is not what the shape says."""
    packed = zstandard.ZstdCompressor(write_content_size=bool(content)).compress(bytes(content or 1 << 24))
    for codec in (Codec.PLANES, Codec.KEYFRAME):
        part = struct.pack("<I", codec | len(packed) << 4) + packed
        assert is_refused(PayloadReader(part).array, np.uint8, 1 << 10)


def test_words_of_another_version_before_are_refused() -> None:
    def one_bit_off(frame: int) -> Words:
        words = BASE.frame(frame).copy()
        words[-1] ^= 1
        return words

    payload, rules = payload_of("word_changes"), merge_settings("word_changes")
    for before in (None, words_of(drawn(6)), dataclasses.replace(BASE, frame=one_bit_off)):
        assert is_refused(read, payload, rules, before)


def test_a_rank_above_the_settings_is_refused() -> None:
    lower = merge_settings("low_rank").model_copy(update={"rank": 3})
    assert is_refused(read, payload_of("low_rank"), lower)
