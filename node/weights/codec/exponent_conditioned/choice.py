"""The implementation of the codec's loops that this process uses: the C kernel, or numpy."""

import functools
from typing import Protocol

from node.weights.codec import native
from node.weights.codec.exponent_conditioned import reference
from node.weights.codec.exponent_conditioned.payload_format import Delta
from node.weights.format.digests import Words


class Implementation(Protocol):
    """An implementation. A frame has at least one word and at most limits.FRAME_WORDS."""

    @property
    def name(self) -> str:
        """Name of the implementation, for the log."""

    def encode(self, words: Words, *, base: Words, limit_bytes: int) -> Delta:
        """Return what makes ``words`` from ``base``."""

    def decode(self, payload: bytes, *, base: Words, out: Words) -> int:
        """Write the words to ``out`` and return their digest, or raise BrokenPayloadError."""

    def join(self, rest: bytes, exponents: bytes, *, out: Words) -> int:
        """Write words made of a byte of sign and mantissa and of exponent; return their digest."""


@functools.cache
def implementation() -> Implementation:
    """Return the C kernel, or the reference in numpy where there is none; ``native.load`` then warns."""
    return native.load() or reference
