"""The implementation of the exponent-conditioned codec that this process uses: the C kernel, or numpy."""

import functools
from typing import Protocol

from node.weights.codec import native as kernels
from node.weights.codec.exponent_conditioned import reference
from node.weights.codec.exponent_conditioned.payload_format import (
    INFINITY_BITS,
    BrokenPayloadError,
    Delta,
    Fault,
)
from node.weights.format.digests import Words, words_digest


class Implementation(Protocol):
    """An implementation. A frame has at least one word and at most limits.FRAME_WORDS."""

    @property
    def name(self) -> str:
        """Name of the implementation, for the log."""

    def encode(self, words: Words, *, base: Words, limit_bytes: int) -> Delta:
        """Return what makes ``words`` from ``base``."""

    def decode(self, payload: bytes, *, base: Words, out: Words) -> int:
        """Write the words to ``out`` and return their digest, or raise BrokenPayloadError."""


class NativeCodec:
    """The codec, on one path of the kernel."""

    def __init__(self, kernel: kernels.Kernel) -> None:
        self._kernel = kernel

    @property
    def name(self) -> str:
        return f"C, {self._kernel.path}"

    def encode(self, words: Words, *, base: Words, limit_bytes: int) -> Delta:
        """Return what makes ``words`` from ``base``."""
        payload, facts = self._kernel.encode(words, base=base, limit_bytes=limit_bytes)
        return Delta(
            payload,
            changes=facts.changes,
            digest=facts.digest or words_digest(words),
            is_finite=facts.largest < INFINITY_BITS,
        )

    def decode(self, payload: bytes, *, base: Words, out: Words) -> int:
        """Write the words to ``out`` and return their digest.

        Raises BrokenPayloadError: no encoder makes this payload; ``out`` is worthless.
        """
        fault, facts = self._kernel.decode(payload, base=base, out=out)
        if fault:
            raise BrokenPayloadError(Fault(fault))
        return facts.digest or words_digest(out)


@functools.cache
def implementation() -> Implementation:
    """Return the C kernel, or the reference in numpy where there is none; ``native.load`` then warns."""
    kernel = kernels.load()
    return reference if kernel is None else NativeCodec(kernel)
