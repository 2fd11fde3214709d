"""Payloads by hand, and the ones no encoder makes."""

import struct
from functools import cache

import numpy as np
import pytest
import zstandard

from node.errors import Reason, RefusedError
from node.weights.codec.frame_codec import decode_frame, encode_frame
from node.weights.format.digests import Words, words_digest
from node.weights.format.manifest import Codec, payload_limit
from support.refusals import naming
from support.weights import drifted, random_words


def words_of(*values: int) -> Words:
    return np.array(values, np.uint16)


def coded(words: Words, *, base: Words | None) -> tuple[Codec, bytes]:
    frame = encode_frame(words, base=base)
    return frame.codec, frame.payload


def decoded(codec: Codec, payload: bytes, *, base: Words | None, words: int) -> Words:
    out = np.zeros(words, np.uint16)
    assert decode_frame(codec, payload, base=base, out=out) == words_digest(out)
    return out


def refusal(codec: Codec, payload: bytes, *, base: Words | None = None, words: int = 4096) -> RefusedError:
    base = np.zeros(words, np.uint16) if base is None and codec.needs_base else base
    with pytest.raises(RefusedError) as refused:
        decode_frame(codec, payload, base=base, out=np.zeros(words, np.uint16))
    assert refused.value.reason is Reason.MALFORMED
    return refused.value


def test_equal_words_cost_nothing() -> None:
    words = random_words(1)
    assert coded(words, base=words.copy()) == (Codec.UNCHANGED, b"")


def test_a_step_of_training_is_coded_by_the_exponents_of_its_base() -> None:
    base = random_words(1)
    new = drifted(base, 2)
    codec, payload = coded(new, base=base)
    assert codec is Codec.EXPONENT_CONDITIONED
    assert len(payload) < 0.1 * new.nbytes
    np.testing.assert_array_equal(decoded(codec, payload, base=base, words=new.size), new)


def test_changes_with_a_pattern_are_left_to_zstd() -> None:
    base = random_words(1)
    new = base + np.uint16(0x1234)
    codec, payload = coded(new, base=base)
    assert codec is Codec.STEP_PLANES
    assert len(payload) < 0.01 * new.nbytes
    np.testing.assert_array_equal(decoded(codec, payload, base=base, words=new.size), new)


def test_what_was_learnt_of_the_words_is_the_same_by_every_codec() -> None:
    base = random_words(1)
    for new in (base, drifted(base, 2), random_words(2)):
        for held in (base, None):
            frame = encode_frame(new, base=held)
            assert (frame.digest, frame.is_finite) == (words_digest(new), True)


@pytest.mark.parametrize("word", [0x7F80, 0xFF80, 0x7FC1, 0xFFFF])
def test_a_word_that_is_no_number_is_noticed_wherever_it_is(word: int) -> None:
    base = random_words(1)
    for place in (0, 700, base.size - 1):
        new = base.copy()
        new[place] = word
        assert not encode_frame(new, base=base).is_finite
        assert not encode_frame(new, base=new.copy()).is_finite
        assert not encode_frame(new, base=None).is_finite


def test_words_that_all_changed_are_coded_as_a_keyframe() -> None:
    codec, payload = coded(random_words(2), base=random_words(1))
    assert codec is Codec.KEYFRAME
    np.testing.assert_array_equal(
        decoded(codec, payload, base=None, words=random_words(2).size), random_words(2)
    )


def test_noise_is_sent_raw() -> None:
    noise = np.random.default_rng(0).integers(0, 1 << 16, 5000).astype(np.uint16)
    assert coded(noise, base=None) == (Codec.RAW, noise.tobytes())


def test_the_keyframe_payload_is_as_documented() -> None:
    # 1.0 = 0x3F80: sign 0, exponent 127, mantissa 0. -2.5 = 0xC020: sign 1, exponent 128, mantissa 32.
    words = np.tile(words_of(0x3F80, 0xC020), 100)
    frame = encode_frame(words, base=None)
    assert frame.codec is Codec.KEYFRAME
    assert frame.payload[:200] == bytes([0x00, 0xA0]) * 100
    assert zstandard.decompress(frame.payload[200:]) == bytes([127, 128]) * 100


def test_a_frame_without_its_base_is_our_own_mistake() -> None:
    with naming(ValueError, "UNCHANGED", "3"):
        decode_frame(Codec.UNCHANGED, b"", base=None, out=np.zeros(3, np.uint16))


@pytest.mark.parametrize("size", [0, 8190, 8194])
def test_a_raw_payload_has_two_bytes_a_word(size: int) -> None:
    refusal(Codec.RAW, bytes(size))


@pytest.mark.parametrize("exponents", [4095, 4097])
def test_a_keyframe_payload_has_an_exponent_a_word(exponents: int) -> None:
    refusal(Codec.KEYFRAME, bytes(4096) + zstandard.compress(bytes(exponents)))


def test_a_keyframe_payload_of_too_few_bytes_is_refused() -> None:
    refusal(Codec.KEYFRAME, bytes(4095))


def test_an_unchanged_frame_has_no_payload() -> None:
    refusal(Codec.UNCHANGED, b"\0")


def test_planes_of_steps_without_a_step_are_refused() -> None:
    assert "no element changes" in str(refusal(Codec.STEP_PLANES, zstandard.compress(bytes(8192))))


@cache
def bombs(size: int) -> dict[str, bytes]:
    """Return zstd frames that no encoder makes, of ``size`` bytes where they come so far; 256 to 65 000."""
    plain = b"\1" * size
    good = zstandard.compress(plain)
    block = good[zstandard.frame_header_size(good) :]
    dictionary = zstandard.ZstdCompressionDict(
        bytes(range(256)) * 8, dict_type=zstandard.DICT_TYPE_RAWCONTENT
    )
    return {
        "64 MiB of zeros": zstandard.compress(bytes(64 << 20)),
        "no content size": zstandard.ZstdCompressor(write_content_size=False).compress(plain),
        # Frame header: magic, descriptor (8-byte content size, single segment), content size.
        "declares 2 GiB": b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2 << 30) + block,
        # Descriptor: 4-byte content size, window descriptor byte for 2 GiB.
        "a huge window": b"\x28\xb5\x2f\xfd\x80" + bytes([21 << 3]) + struct.pack("<I", size) + block,
        "two frames": good + good,
        "trailing bytes": good + b"\0",
        "truncated": good[:-1],
        "less than declared": good[:5] + struct.pack("<H", size - 256) + zstandard.compress(plain[1:])[7:],
        "a skippable frame": b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"aaaa" + good,
        # Descriptor: 2-byte content size, single segment, 1-byte dictionary id.
        "a dictionary": b"\x28\xb5\x2f\xfd\x61\x07" + struct.pack("<H", size - 256) + block,
        "nothing": b"",
        "no zstd at all": b"\0" * 20,
        "compressed with another dictionary": zstandard.ZstdCompressor(dict_data=dictionary).compress(
            bytes(range(256)) * (size // 256)
        ),
    }


@pytest.mark.parametrize("name", bombs(4096))
def test_a_zstd_frame_that_is_not_ours_is_refused(name: str) -> None:
    refusal(Codec.STEP_PLANES, bombs(8192)[name])
    refusal(Codec.KEYFRAME, bytes(4096) + bombs(4096)[name])


@pytest.mark.parametrize(
    ("codec", "size"), [(Codec.KEYFRAME, 4096), (Codec.PLANES, 2 * 4096), (Codec.STEP_PLANES, 2 * 4096)]
)
@pytest.mark.parametrize("more", [-1, 1])
def test_a_zstd_frame_of_another_size_than_the_words_need_is_refused_unread(
    codec: Codec, size: int, more: int
) -> None:
    before = bytes(4096) if codec is Codec.KEYFRAME else b""
    message = str(refusal(codec, before + zstandard.compress(bytes(size + more))))
    assert f"a zstd frame of {size + more} bytes, not {size}" in message


def test_a_small_frame_may_have_the_smallest_window_of_zstd_and_none_larger() -> None:
    plain = bytes([14, *bytes(39)])

    def windowed(log2_bytes: int) -> bytes:
        header = b"\x28\xb5\x2f\xfd\x80" + bytes([log2_bytes - 10 << 3]) + struct.pack("<I", len(plain))
        return header + zstandard.compress(plain)[6:]

    assert decoded(Codec.STEP_PLANES, windowed(10), base=np.zeros(20, np.uint16), words=20)[0] == 7
    assert "a zstd window of 2048 bytes" in str(refusal(Codec.STEP_PLANES, windowed(11), words=20))


def test_a_payload_larger_than_the_words_is_refused_unread() -> None:
    assert payload_limit(Codec.STEP_PLANES, 10) == 20
    for codec in (Codec.RAW, Codec.STEP_PLANES, Codec.EXPONENT_CONDITIONED, Codec.KEYFRAME):
        assert "21 bytes for 10 words" in str(refusal(codec, bytes(21), words=10))
