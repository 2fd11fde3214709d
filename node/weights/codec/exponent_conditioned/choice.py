"""Which implementation of the exponent-conditioned codec this process uses."""

import functools
from typing import Protocol

from node.weights.codec import native as kernels
from node.weights.codec.exponent_conditioned import reference
from node.weights.codec.exponent_conditioned.kernel import NativeCodec
from node.weights.codec.exponent_conditioned.payload_format import Delta
from node.weights.format.digests import Words


class Implementation(Protocol):
    """What both have in common. A frame has at least one word and at most limits.FRAME_WORDS."""

    @property
    def name(self) -> str:
        """What runs, in words, for the log."""

    def encode(self, words: Words, *, base: Words, limit_bytes: int) -> Delta:
        """Code what makes ``words`` of ``base``."""

    def decode(self, payload: bytes, *, base: Words, out: Words) -> int:
        """Make the words in ``out``, and return their digest, or raise BrokenPayloadError."""


@functools.cache
def implementation() -> Implementation:
    """Return the C kernel, or the reference in numpy where there is none: native.load warns of that."""
    kernel = kernels.load()
    return reference if kernel is None else NativeCodec(kernel)
