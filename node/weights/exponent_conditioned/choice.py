"""Which implementation of the exponent-conditioned codec this process uses."""

import functools
from typing import Protocol

from node.weights import native as kernels
from node.weights.digests import Words
from node.weights.exponent_conditioned import reference
from node.weights.exponent_conditioned.format import Delta
from node.weights.exponent_conditioned.native import NativeCodec


class Implementation(Protocol):
    """What the three have in common. A frame has at least one word and at most limits.FRAME_WORDS."""

    @property
    def name(self) -> str:
        """What runs, in words, for the log."""

    def encode(self, words: Words, *, base: Words, limit_bytes: int) -> Delta:
        """Code what makes ``words`` of ``base``."""

    def decode(self, payload: bytes, *, base: Words, out: Words) -> int:
        """Make the words in ``out``, and give their digest, or raise BrokenPayloadError."""


@functools.cache
def implementation() -> Implementation:
    """Give the fastest there is: the C kernel in vectors, else numba, else the kernel in plain C, else numpy.

    Numba compiles for the processor it is on, the portable path is for any. Of models of which 0.3 to 3 %
    change numba encodes 1.3 to 1.7 times as fast and decodes 1.3 to 2.2 times. Its start, once a process,
    takes 2.8 s to encode and 1.8 s to decode, which 15 GB and 5 GB of model win back: some versions of a
    small one.
    """
    kernel = kernels.load()
    if kernel is not None and kernel.path != kernels.PORTABLE:
        return NativeCodec(kernel)
    try:
        # Takes a moment to import, so only where it is needed.
        from node.weights.exponent_conditioned import jit
    except ImportError:
        return reference if kernel is None else NativeCodec(kernel)
    return jit
