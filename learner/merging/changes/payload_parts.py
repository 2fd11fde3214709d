"""Parts of a change's payload: frames of words and arrays, each as small as the weight codec makes it.

    part    u32: codec in bits 0 to 3, bytes in bits 4 to 31
            the bytes, as node.weights.codec.frame_codec has them

An array is cut into frames of at most ``limits.FRAME_WORDS`` words, as a version is; an odd byte is
followed by a zero. The reader is told how long an array is and allocates nothing else, whatever the payload
says.
"""

import struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from node.errors import RefusedError
from node.values import limits
from node.weights.codec.frame_codec import decode_frame, encode_frame
from node.weights.format.digests import Words
from node.weights.format.dtypes import DTYPES, Dtype
from node.weights.format.manifest import Codec, payload_limit

Array = NDArray[Any]
"""Flat, of uint8, float32 or float64."""

PART_HEADER_BYTES: Final = 4
_CODEC_BITS: Final = 4


class PayloadWriter:
    """Collects the parts of a payload."""

    def __init__(self) -> None:
        """Begin an empty one."""
        self._parts: list[bytes] = []

    def put(self, plain: bytes) -> None:
        """Append bytes as they are."""
        self._parts.append(plain)

    def put_frame(self, words: Words, *, base: Words | None, dtype: Dtype) -> int:
        """Append a frame, coded against ``base``; return the digest of its words.

        Raises:
            ValueError: an element is a NaN or an infinity.
        """
        coded = encode_frame(words, base=base, dtype=dtype)
        if not coded.is_finite:
            raise ValueError("a NaN or an infinity cannot be handed in")
        header = coded.codec | len(coded.payload) << _CODEC_BITS
        self._parts += [struct.pack("<I", header), coded.payload]
        return coded.digest

    def put_array(self, array: Array) -> None:
        """Append an array, of whatever size. Raises ValueError: as ``put_frame``."""
        plain = np.ascontiguousarray(array).view(np.uint8)
        if plain.size % 2:
            plain = np.append(plain, np.uint8(0))
        words = plain.view(np.uint16)
        for start in range(0, words.size, limits.FRAME_WORDS):
            frame = words[start : start + limits.FRAME_WORDS]
            self.put_frame(frame, base=None, dtype=DTYPES[array.dtype.name])

    def payload(self) -> bytes:
        """Return all parts."""
        return b"".join(self._parts)


class PayloadReader:
    """Reads the parts of a payload, which may come from anybody. Raises ValueError where it is broken."""

    def __init__(self, payload: bytes) -> None:
        """Begin at the first byte."""
        self._payload = payload
        self._at = 0

    def take(self, size: int) -> bytes:
        """Return the next bytes as they are."""
        self._at += size
        if self._at > len(self._payload):
            raise ValueError(f"the payload ends at byte {len(self._payload)}, within a part")
        return self._payload[self._at - size : self._at]

    def frame(self, words: int, *, base: Words | None, dtype: Dtype) -> tuple[Words, int]:
        """Return the next frame and the digest of its words."""
        (header,) = struct.unpack("<I", self.take(PART_HEADER_BYTES))
        codec, size = Codec(header & (1 << _CODEC_BITS) - 1), header >> _CODEC_BITS
        if size > payload_limit(codec, words):
            raise ValueError(f"{size} bytes for {words} words")
        out: Words = np.empty(words, np.uint16)
        try:
            digest = decode_frame(codec, self.take(size), base=base, out=out, dtype=dtype)
        except RefusedError as refused:
            raise ValueError(str(refused)) from refused
        if dtype.first_not_finite(out) is not None:
            raise ValueError("an element is a NaN or an infinity")
        return out, digest

    def array(self, dtype: type[np.generic], size: int) -> Array:
        """Return the next array, of ``size`` elements."""
        plain_bytes = size * np.dtype(dtype).itemsize
        words: Words = np.empty((plain_bytes + 1) // 2, np.uint16)
        for start in range(0, words.size, limits.FRAME_WORDS):
            frame = words[start : start + limits.FRAME_WORDS]
            frame[:], _ = self.frame(frame.size, base=None, dtype=DTYPES[np.dtype(dtype).name])
        plain = words.view(np.uint8)
        if plain[plain_bytes:].any():
            raise ValueError("an array's spare byte is not zero")
        return plain[:plain_bytes].view(dtype)

    def finish(self) -> None:
        """Refuse anything after the last part."""
        if self._at != len(self._payload):
            raise ValueError(f"{len(self._payload) - self._at} bytes follow the last part")
