"""Chooses the implementation of the exponent-conditioned codec that this process uses."""

import functools
from typing import Protocol

from node.weights.codec import native as kernels
from node.weights.codec.exponent_conditioned import reference
from node.weights.codec.exponent_conditioned.kernel import NativeCodec
from node.weights.codec.exponent_conditioned.payload_format import Delta
from node.weights.format.digests import Words


class Implementation(Protocol):
    """An implementation. A frame has at least one word and at most limits.FRAME_WORDS."""

    @property
    def name(self) -> str:
        """What runs, for the log."""

    def encode(self, words: Words, *, base: Words, limit_bytes: int) -> Delta:
        """Return what makes ``words`` from ``base``."""

    def decode(self, payload: bytes, *, base: Words, out: Words) -> int:
        """Write the words to ``out`` and return their digest, or raise BrokenPayloadError."""


@functools.cache
def implementation() -> Implementation:
    """Return the C kernel, or the reference in numpy where there is none; ``native.load`` then warns."""
    kernel = kernels.load()
    return reference if kernel is None else NativeCodec(kernel)
