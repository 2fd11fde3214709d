"""Codes one frame of words as a payload, and decodes it.

    codec                 base    payload
    UNCHANGED             needed  nothing: the words are those of the base
    RAW                   none    the words, little-endian
    EXPONENT_CONDITIONED  needed  changed places and steps as bits, by the exponents of the base
    KEYFRAME              none    sign and mantissa, a byte per word; then the exponents as one zstd frame
    PLANES                none    elements of any width, byte by byte, in one zstd frame
    STEP_PLANES           needed  their steps, byte by byte, in one zstd frame

A step is new - old on the raw bits, modulo the width of an element: integer arithmetic, never floats, so
every word is reproduced whatever it means. Planes are the lowest bytes of all elements, then the next ones:
neighbours have similar high bytes, and a training step changes low bytes only. Steps are in zigzag: z = 2 *
step, or -2 * step - 1 if it goes down. proto/WEIGHTS.md has every field.

Until its digest is checked a payload may come from a stranger, and afterwards from a faulty learner: every
count is compared with the words of the frame before it is used.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from node.errors import Reason, RefusedError
from node.weights.codec.exponent_conditioned import choice
from node.weights.codec.exponent_conditioned.payload_format import (
    EXPONENT_SHIFT,
    BrokenPayloadError,
    Delta,
)
from node.weights.codec.exponent_conditioned.reference import are_finite
from node.weights.format.digests import Words, words_digest
from node.weights.format.dtypes import BFLOAT16, Dtype
from node.weights.format.manifest import Codec, payload_limit

_Elements = NDArray[np.unsignedinteger[Any]]

_TRAINED_BITS: Final = 12
"""A change by training costs 4 to 9 bits, exponent-conditioned; above, zstd may find a pattern."""
_FEW_BITS: Final = 512
"""Allowance for the other fields of a frame with few changes. zstd's own header is 12 bytes."""
_LEVEL: Final = 1
"""zstd level. Exponents and planes that compress do so at any level; the others never do."""


@dataclass(frozen=True, slots=True)
class EncodedFrame:
    """A payload, its codec, and what coding found out about the words."""

    codec: Codec
    payload: bytes
    digest: int
    """``words_digest`` of the words."""
    is_finite: bool
    """No element is a NaN or an infinity."""


def encode_frame(words: Words, *, base: Words | None, dtype: Dtype = BFLOAT16) -> EncodedFrame:
    """Return ``words`` coded as the smallest payload.

    Args:
        base: what the receiver holds, or None.
        dtype: of the elements; decides which codecs are tried, and what is finite.
    """
    if dtype.element_bytes == 2 and base is not None:
        delta = choice.implementation().encode(words, base=base, limit_bytes=2 * words.size)
        codec, payload = _smallest(delta, words, base=base)
        # Coding has found it out for the most common dtype.
        is_finite = delta.is_finite if dtype is BFLOAT16 else _is_finite(words, dtype)
        return EncodedFrame(codec, payload, delta.digest, is_finite)
    if dtype.element_bytes == 2:
        codec, payload = min(_base_free(words), key=_size)
    else:
        codec, payload = _encode_elements(words, base=base, element_bytes=dtype.element_bytes)
    return EncodedFrame(codec, payload, words_digest(words), _is_finite(words, dtype))


def _is_finite(words: Words, dtype: Dtype) -> bool:
    return are_finite(words) if dtype is BFLOAT16 else dtype.first_not_finite(words) is None


def _encode_elements(words: Words, *, base: Words | None, element_bytes: int) -> tuple[Codec, bytes]:
    candidates = [(Codec.RAW, words.tobytes())]
    if base is not None:
        if np.array_equal(words, base):
            return Codec.UNCHANGED, b""
        steps = encode_step_planes(words, base=base, element_bytes=element_bytes)
        candidates.append((Codec.STEP_PLANES, steps))
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
    rest, exponents = split_words(words)
    return [(Codec.KEYFRAME, rest + _compress(exponents)), (Codec.RAW, words.tobytes())]


def _size(candidate: tuple[Codec, bytes]) -> int:
    return len(candidate[1])


def split_words(words: Words) -> tuple[bytes, bytes]:
    """Return sign and mantissa, which are nearly random, and the exponents: a byte per word each."""
    rest = ((words >> 8) & 0x80 | words & 0x7F).astype(np.uint8)
    return rest.tobytes(), (words >> EXPONENT_SHIFT).astype(np.uint8).tobytes()


def encode_planes(words: Words, *, element_bytes: int) -> bytes:
    return _compress_planes(_elements(words, element_bytes))


def encode_step_planes(words: Words, *, base: Words, element_bytes: int) -> bytes:
    """Return the steps from the elements of ``base``, plane by plane."""
    step = _elements(words, element_bytes) - _elements(base, element_bytes)
    down = step.view(f"<i{element_bytes}") >> (8 * element_bytes - 1)
    return _compress_planes((step << 1) ^ down.view(step.dtype))


def _elements(words: Words, element_bytes: int) -> _Elements:
    return words.view(f"<u{element_bytes}")


def _compress_planes(elements: NDArray[np.integer[Any]]) -> bytes:
    return _compress(elements.view(np.uint8).reshape(elements.size, elements.itemsize).T.tobytes())


def _compress(plain: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(plain)


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
            try:
                return choice.implementation().decode(payload, base=base, out=out)
            except BrokenPayloadError as broken:
                raise _malformed(codec, str(broken)) from broken
        np.copyto(out, base)
    match codec:
        case Codec.RAW:
            if len(payload) != 2 * out.size:
                raise _malformed(codec, f"{len(payload)} bytes for {out.size} words")
            out[:] = np.frombuffer(payload, "<u2")
        case Codec.KEYFRAME:
            if len(payload) < out.size:
                raise _malformed(codec, f"{len(payload)} bytes for {out.size} words")
            exponents = _decompress(codec, payload[out.size :], size_bytes=out.size)
            return choice.implementation().join(payload[: out.size], exponents, out=out)
        case Codec.PLANES:
            _elements(out, dtype.element_bytes)[:] = _decode_planes(codec, payload, out, dtype)
        case Codec.STEP_PLANES:
            zigzag, elements = _decode_planes(codec, payload, out, dtype), _elements(out, dtype.element_bytes)
            if not zigzag.any():
                raise _malformed(codec, "no element changes")
            elements += (zigzag >> 1) ^ -(zigzag & 1)
    return words_digest(out)


def _decode_planes(codec: Codec, payload: bytes, out: Words, dtype: Dtype) -> _Elements:
    plain = _decompress(codec, payload, size_bytes=2 * out.size)
    planes = np.frombuffer(plain, np.uint8).reshape(dtype.element_bytes, -1)
    return planes.T.ravel().view(f"<u{dtype.element_bytes}")


def _decompress(codec: Codec, data: bytes, *, size_bytes: int) -> bytes:
    """Return the content of one zstd frame, which must declare ``size_bytes`` and no larger window."""
    try:
        declared = zstandard.get_frame_parameters(data)
        if declared.content_size != size_bytes:
            what = f"a zstd frame of {declared.content_size} bytes, not {size_bytes}"
            raise _malformed(codec, what)
        if declared.window_size > max(size_bytes, 1 << zstandard.WINDOWLOG_MIN):
            raise _malformed(
                codec, f"a zstd window of {declared.window_size} bytes, at most {size_bytes} allowed"
            )
        # It fails unless the content has the declared size.
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _malformed(codec, f"the zstd frame is broken ({error})") from error


def _malformed(codec: Codec, what: str) -> RefusedError:
    return RefusedError(Reason.MALFORMED, f"a {codec.name} payload: {what}")
