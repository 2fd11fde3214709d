"""A payload as bits: fields of a known width, and numbers whose length grows with their logarithm.

Both are defined in proto/WEIGHTS.md. The lowest bit of a byte comes first.
"""

import numpy as np
from numpy.typing import NDArray

from node.weights.codec.exponent_conditioned.payload_format import (
    GROWS_AT,
    NUMBER_BITS,
    BrokenPayloadError,
    PayloadFault,
)

Numbers = NDArray[np.int64]


class BitWriter:
    """Collects fields, and packs them at the end."""

    def __init__(self) -> None:
        self._values: list[Numbers] = []
        self._widths: list[Numbers] = []

    def put(self, value: int, width: int) -> None:
        """Write the ``width`` low bits of ``value``."""
        self._put(np.array([value]), np.array([width]))

    def put_flags(self, flags: NDArray[np.bool_]) -> None:
        self._put(flags.astype(np.int64), np.ones(flags.size, np.int64))

    def put_numbers(self, numbers: Numbers, low_bits: int) -> None:
        """Write non-negative numbers with ``low_bits`` low bits."""
        ones = numbers >> low_bits
        grows = ones >= GROWS_AT
        # frexp of an integer is exact: 1 more than the floor of its binary logarithm.
        growth = np.where(grows, np.frexp(np.maximum(ones - (GROWS_AT - 1), 1))[1] - 1, 0)
        start = np.where(grows, GROWS_AT - 1 + (1 << growth), ones) << low_bits
        ones = np.where(grows, GROWS_AT + growth, ones)
        self._put((1 << ones) - 1 | (numbers - start) << ones + 1, ones + 1 + low_bits + growth)

    def to_bytes(self) -> bytes:
        """Return everything written. Zeros fill up the last byte."""
        values, widths = np.concatenate(self._values), np.concatenate(self._widths)
        ends = np.cumsum(widths)
        places = np.arange(ends[-1]) - np.repeat(ends - widths, widths)
        bits = np.repeat(values, widths) >> places & 1
        return np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()

    def _put(self, values: Numbers, widths: Numbers) -> None:
        self._values.append(values)
        self._widths.append(widths)


class BitReader:
    """Reads fields. Refuses every field that reaches past the end."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._end = 8 * len(payload)
        self._at = 0

    def take(self, width: int) -> int:
        """Read ``width`` bits. Raises BrokenPayloadError: TRUNCATED."""
        first, past = self._at >> 3, self._at + width + 7 >> 3
        value = int.from_bytes(self._payload[first:past], "little") >> (self._at & 7) & (1 << width) - 1
        self._advance(width)
        return value

    def take_number(self, low_bits: int) -> int:
        """Read a number with ``low_bits`` low bits.

        Raises BrokenPayloadError: NUMBER: no frame has so large a number; TRUNCATED.
        """
        first = self._at >> 3
        window = int.from_bytes(self._payload[first : first + 8], "little") >> (self._at & 7)
        ones = (~window & window + 1).bit_length() - 1
        growth = max(0, ones - GROWS_AT)
        if low_bits + growth > NUMBER_BITS:
            raise BrokenPayloadError(PayloadFault.NUMBER)
        start = ones if ones < GROWS_AT else GROWS_AT - 1 + (1 << growth)
        low = window >> ones + 1 & (1 << low_bits + growth) - 1
        self._advance(ones + 1 + low_bits + growth)
        return (start << low_bits) + low

    def finish(self) -> None:
        """Check that only the zeros that fill up the last byte are left.

        Raises BrokenPayloadError: TRAILING.
        """
        left = self._end - self._at
        if left > 7 or self.take(left) != 0:
            raise BrokenPayloadError(PayloadFault.TRAILING)

    def _advance(self, width: int) -> None:
        self._at += width
        if self._at > self._end:
            raise BrokenPayloadError(PayloadFault.TRUNCATED)
