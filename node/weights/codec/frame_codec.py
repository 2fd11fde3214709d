"""Codes one frame of words as a payload, and decodes it.

    codec                 base    payload
    UNCHANGED             needed  nothing: the words are those of the base
    RAW                   none    the words, little-endian
    EXPONENT_CONDITIONED  needed  changed places and steps as bits, by the exponents of the base
    KEYFRAME              none    sign and mantissa, a byte per word; then the exponents as one zstd frame
    PLANES                none    elements of any width, byte by byte, in one zstd frame
    STEP_PLANES           needed  their steps, byte by byte, in one zstd frame

A step is new - old on the raw bits, modulo the width of an element: integer arithmetic, never floats, so
every word is reproduced whatever it means. proto/WEIGHTS.md has every field.

Until its digest is checked a payload may come from a stranger, and afterwards from a faulty learner: every
count is compared with the words of the frame before it is used.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import zstandard

from node.errors import Reason, RefusedError
from node.weights.codec.exponent_conditioned import choice
from node.weights.codec.exponent_conditioned.payload_format import BrokenPayloadError, Delta
from node.weights.codec.exponent_conditioned.reference import are_finite
from node.weights.codec.planes import (
    add_step_planes,
    encode_planes,
    encode_step_planes,
    join_words,
    split_words,
    write_planes,
)
from node.weights.format.digests import Words, words_digest
from node.weights.format.dtypes import BFLOAT16, Dtype
from node.weights.format.payload_codec import Codec, payload_limit


@dataclass(frozen=True, slots=True)
class EncodedFrame:
    """A payload, its codec, and what coding found out about the words."""

    codec: Codec
    payload: bytes
    digest: int
    """``words_digest`` of the words."""
    is_finite: bool
    """No element is a NaN or an infinity."""


_TRAINED_BITS: Final = 12
"""A change by training costs 4 to 9 bits, exponent-conditioned; above, zstd may find a pattern."""
_FEW_BITS: Final = 512
"""Allowance for the other fields of a frame with few changes. zstd's own header is 12 bytes."""
_LEVEL: Final = 1
"""zstd level. Exponents compress at any level."""


def encode_frame(words: Words, *, base: Words | None, dtype: Dtype = BFLOAT16) -> EncodedFrame:
    """Return ``words`` coded as the smallest payload.

    Args:
        base: what the receiver holds, or None.
        dtype: of the elements; decides which codecs are tried, and what is finite.
    """
    if dtype.element_bytes != 2:
        codec, payload = _encode_elements(words, base=base, element_bytes=dtype.element_bytes)
        return EncodedFrame(codec, payload, words_digest(words), dtype.first_not_finite(words) is None)
    if base is None:
        codec, payload = min(_base_free(words), key=_size)
        return EncodedFrame(codec, payload, words_digest(words), _is_finite(words, dtype))
    delta = choice.implementation().encode(words, base=base, limit_bytes=2 * words.size)
    codec, payload = _smallest(delta, words, base=base)
    # Coding has found it out for the most common dtype.
    is_finite = delta.is_finite if dtype is BFLOAT16 else _is_finite(words, dtype)
    return EncodedFrame(codec, payload, delta.digest, is_finite)


def _is_finite(words: Words, dtype: Dtype) -> bool:
    return are_finite(words) if dtype is BFLOAT16 else dtype.first_not_finite(words) is None


def _encode_elements(words: Words, *, base: Words | None, element_bytes: int) -> tuple[Codec, bytes]:
    candidates = [(Codec.RAW, words.tobytes())]
    if base is not None:
        if np.array_equal(words, base):
            return Codec.UNCHANGED, b""
        candidates.append(
            (Codec.STEP_PLANES, encode_step_planes(words, base=base, element_bytes=element_bytes))
        )
    if min(map(_size, candidates)) > words.size:
        candidates.append((Codec.PLANES, encode_planes(words, element_bytes=element_bytes)))
    return min(candidates, key=_size)


def _smallest(delta: Delta, words: Words, *, base: Words) -> tuple[Codec, bytes]:
    if delta.changes == 0:
        return Codec.UNCHANGED, b""
    candidates = []
    if delta.payload is not None:
        candidates.append((Codec.EXPONENT_CONDITIONED, delta.payload))
        if 8 * len(delta.payload) <= _TRAINED_BITS * delta.changes + _FEW_BITS:
            return candidates[0]
    candidates.append((Codec.STEP_PLANES, encode_step_planes(words, base=base, element_bytes=2)))
    # A keyframe has a byte of sign and mantissa per word, before its exponents.
    if min(map(_size, candidates)) > words.size:
        candidates += _base_free(words)
    return min(candidates, key=_size)


def _base_free(words: Words) -> list[tuple[Codec, bytes]]:
    return [(Codec.KEYFRAME, _encode_keyframe(words)), (Codec.RAW, words.tobytes())]


def _size(candidate: tuple[Codec, bytes]) -> int:
    return len(candidate[1])


def decode_frame(
    codec: Codec, payload: bytes, *, base: Words | None, out: Words, dtype: Dtype = BFLOAT16
) -> int:
    """Write the words of a payload to ``out``, which has the frame's size; return their ``words_digest``.

    Args:
        base: the words the payload was coded against; needed if ``codec.needs_base``.
        out: overwritten; worthless if this raises. Must not overlap ``base``.
        dtype: of the elements; any codec may come with any dtype.
    Raises RefusedError: MALFORMED: no encoder makes this payload. ValueError: the base is missing or has
    another size; the words do not hold whole elements.
    """
    if len(payload) > payload_limit(codec, out.size):
        raise _malformed(codec, f"{len(payload)} bytes for {out.size} words")
    if codec.needs_base:
        if base is None or base.size != out.size:
            raise ValueError(f"{codec.name} needs a base of {out.size} words")
        if codec is Codec.EXPONENT_CONDITIONED:
            return _decode_exponent_conditioned(payload, base=base, out=out)
        np.copyto(out, base)
    match codec:
        case Codec.UNCHANGED:
            pass
        case Codec.RAW:
            if len(payload) != 2 * out.size:
                raise _malformed(codec, f"{len(payload)} bytes for {out.size} words")
            out[:] = np.frombuffer(payload, "<u2")
        case Codec.KEYFRAME:
            return _decode_keyframe(payload, out)
        case Codec.PLANES:
            write_planes(_planes(codec, payload, out), out, element_bytes=dtype.element_bytes)
        case Codec.STEP_PLANES:
            if not add_step_planes(_planes(codec, payload, out), out, element_bytes=dtype.element_bytes):
                raise _malformed(codec, "no element changes")
    return words_digest(out)


def _decode_exponent_conditioned(payload: bytes, *, base: Words, out: Words) -> int:
    try:
        return choice.implementation().decode(payload, base=base, out=out)
    except BrokenPayloadError as broken:
        raise _malformed(Codec.EXPONENT_CONDITIONED, str(broken)) from broken


def _encode_keyframe(words: Words) -> bytes:
    rest, exponents = split_words(words)
    return rest + zstandard.ZstdCompressor(level=_LEVEL).compress(exponents)


def _decode_keyframe(payload: bytes, out: Words) -> int:
    if len(payload) < out.size:
        raise _malformed(Codec.KEYFRAME, f"{len(payload)} bytes for {out.size} words")
    exponents = _decompress(Codec.KEYFRAME, payload[out.size :], limit_bytes=out.size)
    if len(exponents) != out.size:
        raise _malformed(Codec.KEYFRAME, f"{len(exponents)} exponents for {out.size} words")
    return join_words(payload[: out.size], exponents, out=out)


def _planes(codec: Codec, payload: bytes, out: Words) -> bytes:
    plain = _decompress(codec, payload, limit_bytes=2 * out.size)
    if len(plain) != 2 * out.size:
        raise _malformed(codec, f"planes of {len(plain)} bytes for {out.size} words")
    return plain


def _decompress(codec: Codec, data: bytes, *, limit_bytes: int) -> bytes:
    """Return the content of exactly one zstd frame, after checking the size and window that it declares."""
    try:
        promised = zstandard.get_frame_parameters(data)
        if not 0 <= promised.content_size <= limit_bytes:
            raise _malformed(
                codec, f"a zstd frame of {promised.content_size} bytes, at most {limit_bytes} allowed"
            )
        if promised.window_size > max(limit_bytes, 1 << zstandard.WINDOWLOG_MIN):
            raise _malformed(
                codec, f"a zstd window of {promised.window_size} bytes, at most {limit_bytes} allowed"
            )
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _malformed(codec, f"the zstd frame is broken ({error})") from error


def _malformed(codec: Codec, what: str) -> RefusedError:
    return RefusedError(Reason.MALFORMED, f"a {codec.name} payload: {what}")
