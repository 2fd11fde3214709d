"""Changes by their largest entries alone, 2 bits each: the sign, and which of two sizes.

    sizes     float32, the mean of the entries below the mean of |x|, and of the others
    bits      u32: bits of the quotients | low bits, plane by plane | quotients, each a row of ones and a zero
    signs     a bit an entry: 1 if it goes down
    large     a bit an entry: 1 if it has the larger size

How many there are follows from the shape: ``share`` of the entries, rounded up. A place is the gap since
the place before it, in Golomb-Rice form; how many low bits it has follows from the mean gap. Where 1 % are
handed in, a place takes 8.1 bits; the bound is 8.08.

Source: SparseLoCo, arXiv:2508.15706, has few entries at 2 bits. That 1 % is enough if the rest is fed back
is ours.
"""

import math
import struct

import numpy as np
import torch
from numpy.typing import NDArray

from learner.merging.changes.payload_parts import PayloadReader, PayloadWriter

Places = NDArray[np.int64]


class LargestCodec:
    """Hands in the entries that have changed most."""

    def __init__(self, share: float) -> None:
        """Hand in this share of each tensor's entries, in (0, 1]."""
        self._share = share

    def write(self, change: NDArray[np.float32], shape: tuple[int, ...], to: PayloadWriter) -> None:
        """Append a change, flat, and take off what is handed in."""
        count = self._count(change.size)
        chosen = torch.from_numpy(change).abs().topk(count, sorted=False).indices
        places = chosen.sort().values.numpy()
        entries = change[places]
        amounts = np.abs(entries)
        is_large = amounts > amounts.mean(dtype=np.float64)
        sizes = np.array([_mean(amounts[~is_large]), _mean(amounts[is_large])], np.float32)
        to.put_array(sizes)
        _write_places(places, change.size, to)
        to.put_array(np.packbits(entries < 0))
        to.put_array(np.packbits(is_large))
        change[places] -= np.where(entries < 0, -1, 1).astype(np.float32) * sizes[is_large.astype(np.intp)]

    def read(self, shape: tuple[int, ...], reader: PayloadReader) -> NDArray[np.float64]:
        """Return a change, flat."""
        change = np.zeros(math.prod(shape), np.float64)
        count = self._count(change.size)
        sizes = reader.array(np.float32, 2).astype(np.float64)
        places = _read_places(count, change.size, reader)
        goes_down = _read_bits(count, reader)
        is_large = _read_bits(count, reader)
        change[places] = np.where(goes_down, -1.0, 1.0) * sizes[is_large]
        return change

    def _count(self, entries: int) -> int:
        return math.ceil(self._share * entries)


def _mean(amounts: NDArray[np.float32]) -> float:
    return float(amounts.mean(dtype=np.float64)) if amounts.size else 0.0


def _low_bits(count: int, entries: int) -> int:
    """Return how many low bits make gaps shortest: 2 to their power is ln 2 of the mean gap, rounded down."""
    return max(0, math.floor(math.log2(math.log(2) * entries / count)))


def _write_places(places: Places, entries: int, to: PayloadWriter) -> None:
    gaps = np.diff(places, prepend=-1) - 1
    low_bits = _low_bits(places.size, entries)
    ends = np.cumsum((gaps >> low_bits) + 1) - 1
    quotients = np.ones(int(ends[-1]) + 1, np.uint8)
    quotients[ends] = 0
    to.put(struct.pack("<Q", quotients.size))
    for bit in range(low_bits):
        to.put_array(np.packbits((gaps >> bit & 1).astype(np.uint8)))
    to.put_array(np.packbits(quotients))


def _read_places(count: int, entries: int, reader: PayloadReader) -> Places:
    low_bits = _low_bits(count, entries)
    (size,) = struct.unpack("<Q", reader.take(8))
    if not count <= size <= count + (entries >> low_bits):
        raise ValueError(f"{size} bits for the places of {count} entries")
    gaps = np.zeros(count, np.int64)
    for bit in range(low_bits):
        gaps |= _read_bits(count, reader).astype(np.int64) << bit
    ends = np.flatnonzero(_read_bits(size, reader) == 0)
    if ends.size != count or ends[-1] != size - 1:
        raise ValueError(f"{ends.size} places where {count} entries are handed in")
    places: Places = np.cumsum(gaps + (np.diff(ends, prepend=-1) - 1 << low_bits) + 1) - 1
    if places[-1] >= entries:
        raise ValueError(f"an entry at place {places[-1]} of {entries}")
    return places


def _read_bits(count: int, reader: PayloadReader) -> NDArray[np.uint8]:
    return np.unpackbits(reader.array(np.uint8, (count + 7) // 8), count=count)
