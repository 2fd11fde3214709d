"""Frames and bit streams for the tests of the exponent-conditioned codec."""

import numpy as np

from node.weights.codec import native
from node.weights.codec.exponent_conditioned import reference
from node.weights.codec.exponent_conditioned.bit_stream import BitWriter
from node.weights.codec.exponent_conditioned.choice import Implementation
from node.weights.codec.exponent_conditioned.payload_format import BrokenPayloadError, PayloadFault
from node.weights.format.digests import Words


def implementations() -> list[Implementation]:
    """Return every implementation that runs here: numpy, and the kernel on each path it has."""
    kernels = [native.load(path) for path in range(len(native.PATHS))]
    return [reference, *(kernel for kernel in kernels if kernel is not None)]


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
    """Return the payload of the reference."""
    payload = reference.encode(words, base=base, limit_bytes=1 << 30).payload
    assert payload is not None
    return payload


def fault_of(implementation: Implementation, payload: bytes, *, base: Words) -> tuple[PayloadFault, bytes]:
    """Return the fault that is found, or the words that are made."""
    out = np.zeros_like(base)
    try:
        implementation.decode(payload, base=base, out=out)
    except BrokenPayloadError as broken:
        return broken.fault, b""
    return PayloadFault.NONE, out.tobytes()


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
        """Return the payload."""
        return self._bits.to_bytes()


FAULTS_BASE: Words = np.full(20, 120 << 7, np.uint16)
"""Twenty words of one exponent, 120: what the payloads of FAULTS are for."""


def well_begun() -> Fields:
    """Return a payload up to the positions of class 0, exponents from 120."""
    return Fields(120, 1)


def one_change(*, sign: int = 0) -> Fields:
    """Return a payload of one change at the first word, up to its size."""
    return well_begun().surprise(1 - 7).surprise(0 - -6).number(0, 0).bits(sign, 1)


FAULTS: dict[str, tuple[bytes, PayloadFault]] = {
    "nothing": (b"", PayloadFault.TRUNCATED),
    "half a header": (b"\x78\x01", PayloadFault.TRUNCATED),
    "no class": (Fields(120, 0).to_bytes(), PayloadFault.COUNT),
    "ends before the class": (well_begun().to_bytes(), PayloadFault.TRUNCATED),
    "a number of 29 ones": (well_begun().bits((1 << 29) - 1, 32).to_bytes(), PayloadFault.NUMBER),
    "64 ones": (well_begun().bits((1 << 40) - 1, 40).bits((1 << 40) - 1, 40).to_bytes(), PayloadFault.NUMBER),
    "a width below zero": (well_begun().surprise(-8).to_bytes(), PayloadFault.PARAMETER),
    "a width above 21": (well_begun().surprise(15).to_bytes(), PayloadFault.PARAMETER),
    "a class without changes": (well_begun().surprise(-7).to_bytes(), PayloadFault.COUNT),
    "more changes than words": (well_begun().surprise(5 - 7).bits(5, 4).to_bytes(), PayloadFault.COUNT),
    "gaps with 21 low bits": (
        well_begun().surprise(1 - 7).surprise(21 + 6).to_bytes(),
        PayloadFault.PARAMETER,
    ),
    "runs with 21 low bits": (
        well_begun().surprise(1 - 7).surprise(-22 + 6).to_bytes(),
        PayloadFault.PARAMETER,
    ),
    "a change past the frame": (
        well_begun().surprise(1 - 7).surprise(0 + 6).number(20, 0).to_bytes(),
        PayloadFault.POSITION,
    ),
    "the second change past the frame": (
        well_begun().surprise(2 - 7).bits(0, 1).surprise(0 + 6).number(18, 0).number(1, 0).to_bytes(),
        PayloadFault.POSITION,
    ),
    "a longer run than changes": (
        well_begun().surprise(1 - 7).surprise(-1 + 6).number(2, 0).to_bytes(),
        PayloadFault.POSITION,
    ),
    "empty runs past the frame": (
        well_begun().surprise(1 - 7).surprise(-1 + 6).bits(0, 24).bits(0, 24).to_bytes(),
        PayloadFault.POSITION,
    ),
    "ends before the sign": (
        well_begun().surprise(1 - 7).surprise(6).number(0, 0).to_bytes(),
        PayloadFault.TRUNCATED,
    ),
    "more large steps than changes": (one_change().surprise(2 - 7).bits(0, 1).to_bytes(), PayloadFault.COUNT),
    "a large step past the changes": (
        one_change().surprise(1 - 7).surprise(0 - -5).number(1, 0).to_bytes(),
        PayloadFault.POSITION,
    ),
    "sizes with 21 low bits": (
        one_change().surprise(1 - 7).surprise(5).number(0, 0).surprise(21 - 5).to_bytes(),
        PayloadFault.PARAMETER,
    ),
    "sizes with -1 low bits": (
        one_change().surprise(1 - 7).surprise(5).number(0, 0).surprise(-1 - 5).to_bytes(),
        PayloadFault.PARAMETER,
    ),
    "32768 up": (
        one_change().surprise(1 - 7).surprise(5).number(0, 0).surprise(14 - 5).number(32766, 14).to_bytes(),
        PayloadFault.SIZE,
    ),
    "32769 down": (
        one_change(sign=1)
        .surprise(1 - 7)
        .surprise(5)
        .number(0, 0)
        .surprise(14 - 5)
        .number(32767, 14)
        .to_bytes(),
        PayloadFault.SIZE,
    ),
    "a byte too many": (one_change().surprise(-7).to_bytes() + b"\0", PayloadFault.TRAILING),
    "a bit in the filling": (one_change().surprise(-7).bits(1, 1).to_bytes(), PayloadFault.TRAILING),
    "a class the base does not have": (
        Fields(100, 1).surprise(1 - 7).surprise(6).number(0, 0).bits(0, 1).surprise(-7).to_bytes(),
        PayloadFault.POSITION,
    ),
}
"""Payloads that no encoder makes, and what is wrong with each."""
