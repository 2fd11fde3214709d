"""Takes elements apart into planes of bytes, of which some compress well.

Elements of any width: all lowest bytes, all the next ones, in a zstd frame. Neighbouring elements have
similar high bytes, and a training step changes low bytes only. A step is new - old on the raw bits modulo the
width of an element, in zigzag: z = 2 * step, or -2 * step - 1 if it goes down.

bfloat16 of a keyframe: sign and mantissa, nearly random, and the exponent. Joining them is most of a
keyframe's cost to a sampler, so the C kernel does it where there is one.
"""

import functools
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from node.weights.codec import native as kernels
from node.weights.format.digests import Words, words_digest

Elements = NDArray[np.unsignedinteger[Any]]

_LEVEL: Final = 1
"""zstd level. Planes that compress do so at any level; the others never do."""

_EXPONENT_SHIFT: Final = 7

_kernel = functools.cache(kernels.load)


def encode_planes(words: Words, *, element_bytes: int) -> bytes:
    """Return the elements, plane by plane."""
    return _compress(_elements(words, element_bytes))


def encode_step_planes(words: Words, *, base: Words, element_bytes: int) -> bytes:
    """Return the steps from the elements of ``base``, plane by plane."""
    step = _elements(words, element_bytes) - _elements(base, element_bytes)
    down = step.view(f"<i{element_bytes}") >> (8 * element_bytes - 1)
    return _compress((step << 1) ^ down.view(step.dtype))


def write_planes(plain: bytes, out: Words, *, element_bytes: int) -> None:
    """Write the elements of some planes, which have 2 bytes for each word of ``out``."""
    _elements(out, element_bytes)[:] = _joined(plain, element_bytes)


def add_step_planes(plain: bytes, out: Words, *, element_bytes: int) -> int:
    """Add steps to the elements of ``out``; return how many of them are not zero."""
    zigzag, elements = _joined(plain, element_bytes), _elements(out, element_bytes)
    elements += (zigzag >> 1) ^ -(zigzag & 1)
    return int(np.count_nonzero(zigzag))


def _elements(words: Words, element_bytes: int) -> Elements:
    return words.view(f"<u{element_bytes}")


def _compress(elements: NDArray[np.integer[Any]]) -> bytes:
    planes = elements.view(np.uint8).reshape(elements.size, elements.itemsize).T
    return zstandard.ZstdCompressor(level=_LEVEL).compress(planes.tobytes())


def _joined(plain: bytes, element_bytes: int) -> Elements:
    planes = np.frombuffer(plain, np.uint8).reshape(element_bytes, -1)
    return planes.T.ravel().view(f"<u{element_bytes}")


def split_words(words: Words) -> tuple[bytes, bytes]:
    """Return sign and mantissa, and the exponents, a byte per word each."""
    rest = ((words >> 8) & 0x80 | words & 0x7F).astype(np.uint8)
    return rest.tobytes(), (words >> _EXPONENT_SHIFT).astype(np.uint8).tobytes()


def join_words(rest: bytes, exponents: bytes, *, out: Words) -> int:
    """Write the words made of a byte of each to ``out``; return their ``words_digest``."""
    kernel = _kernel()
    if kernel is not None:
        return kernel.join(rest, exponents, out=out).digest or words_digest(out)
    low = np.frombuffer(rest, np.uint8).astype(np.uint16)
    high = np.frombuffer(exponents, np.uint8).astype(np.uint16)
    np.bitwise_or((low & 0x80) << 8 | low & 0x7F, high << _EXPONENT_SHIFT, out=out)
    return words_digest(out)
