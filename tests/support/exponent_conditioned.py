"""Frames and bit streams for the tests of the exponent-conditioned codec."""

import numpy as np

from node.weights import native
from node.weights.digests import Words
from node.weights.exponent_conditioned import jit, reference
from node.weights.exponent_conditioned.bits import BitWriter
from node.weights.exponent_conditioned.choice import Implementation
from node.weights.exponent_conditioned.format import BrokenPayloadError, Fault
from node.weights.exponent_conditioned.native import NativeCodec


def implementations() -> list[Implementation]:
    """Give every implementation that runs here: numpy and numba always, the kernel on each path it has."""
    kernels = [native.load(path) for path in range(len(native.PATHS))]
    return [reference, jit, *(NativeCodec(kernel) for kernel in kernels if kernel is not None)]


def trained_words(size: int, *, seed: int) -> Words:
    """Make words as those of a trained model, with some zeros and some far larger ones."""
    random = np.random.default_rng(seed)
    values = (0.02 * random.standard_normal(size)).astype(np.float32)
    values[random.random(size) < 0.001] = 0.0
    values[random.random(size) < 0.001] *= 100
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def trained_step(base: Words, *, seed: int, step: float) -> Words:
    """Move words by an optimizer step of one size, so that small ones change more often than large ones."""
    random = np.random.default_rng(seed)
    values = (base.astype(np.uint32) << 16 | random.integers(0, 1 << 16, base.size, np.uint32)).view(
        np.float32
    )
    moved = values + (step * random.standard_normal(base.size)).astype(np.float32)
    new: Words = (moved.view(np.uint32) >> 16).astype(np.uint16)
    return new


def coded(words: Words, *, base: Words) -> bytes:
    """Give the payload of the reference."""
    payload = reference.encode(words, base=base, limit_bytes=1 << 30).payload
    assert payload is not None
    return payload


def fault_of(implementation: Implementation, payload: bytes, *, base: Words) -> tuple[Fault, bytes]:
    """Give the fault that is found, or the words that are made."""
    out = np.zeros_like(base)
    try:
        implementation.decode(payload, base=base, out=out)
    except BrokenPayloadError as broken:
        return broken.fault, b""
    return Fault.NONE, out.tobytes()


class Fields:
    """A payload written field by field; a class is predicted as proto/WEIGHTS.md says."""

    def __init__(self, first: int, present: int) -> None:
        self._bits = BitWriter()
        self._bits.put(first, 8)
        self._bits.put(present, 16)

    def bits(self, value: int, width: int) -> "Fields":
        """Add bits."""
        self._bits.put(value, width)
        return self

    def number(self, value: int, low_bits: int) -> "Fields":
        """Add a number."""
        self._bits.put_numbers(np.array([value]), low_bits)
        return self

    def surprise(self, value: int) -> "Fields":
        """Add what differs from the prediction."""
        return self.number(2 * value if value >= 0 else -2 * value - 1, 0)

    def to_bytes(self) -> bytes:
        """Give the payload."""
        return self._bits.to_bytes()
