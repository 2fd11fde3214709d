"""Splits bfloat16 words into the two bytes of a keyframe: sign and mantissa, nearly random, and exponent.

Joining them is most of a keyframe's cost to a sampler, so the C kernel does it where there is one.
"""

import functools
from typing import Final

import numpy as np

from node.weights.codec import native as kernels
from node.weights.format.digests import Words, words_digest

_EXPONENT_SHIFT: Final = 7

_kernel = functools.cache(kernels.load)


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
