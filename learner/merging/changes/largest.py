"""Changes by their largest entries alone, 2 bits each: the sign, and which of two sizes.

    sizes     2 float32: the mean of the entries below the mean of |x|, and of the others
    places    u64: bytes | how many are skipped before each entry: bytes, added up to the first below 255
    signs     a bit an entry: 1 if it goes down
    large     a bit an entry: 1 if it has the larger size

How many there are follows from the shape: ``share`` of the entries, rounded up. Where 1 % are handed in, a
place takes 8.2 bits; the bound is 8.08.

Source: SparseLoCo, arXiv:2508.15706, has few entries at 2 bits. That 1 % is enough if the rest is fed back
is ours.
"""

import math
import struct
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from learner.merging.changes.payload_parts import PayloadReader, PayloadWriter

_SKIPPED: Final = 255


class LargestCodec:
    """Hands in the entries that have changed most."""

    def __init__(self, share: float) -> None:
        """Hand in this share of each tensor's entries, in (0, 1]."""
        self._share = share

    def write(self, change: NDArray[np.float32], shape: tuple[int, ...], to: PayloadWriter) -> None:
        """Append a change, flat, and take off what is handed in."""
        chosen = torch.from_numpy(change).abs().topk(self._count(change.size), sorted=False).indices
        places = chosen.sort().values.numpy()
        entries = change[places]
        amounts = np.abs(entries).astype(np.float64)
        is_large = amounts > amounts.mean()
        large = amounts[is_large].mean() if is_large.any() else 0.0
        sizes = np.array([amounts[~is_large].mean(), large], np.float32)
        to.put_array(sizes)
        _write_places(places, to)
        to.put_array(np.packbits(entries < 0))
        to.put_array(np.packbits(is_large))
        change[places] -= np.copysign(sizes[is_large.astype(np.intp)], entries)

    def read(self, shape: tuple[int, ...], reader: PayloadReader) -> NDArray[np.float64]:
        """Return a change, flat."""
        change = np.zeros(math.prod(shape), np.float64)
        count = self._count(change.size)
        sizes = reader.array(np.float32, 2)
        places = _read_places(count, change.size, reader)
        goes_down = np.unpackbits(reader.array(np.uint8, (count + 7) // 8), count=count)
        is_large = np.unpackbits(reader.array(np.uint8, (count + 7) // 8), count=count)
        change[places] = np.where(goes_down, -1.0, 1.0) * sizes[is_large]
        return change

    def _count(self, entries: int) -> int:
        return math.ceil(self._share * entries)


def _write_places(places: NDArray[np.int64], to: PayloadWriter) -> None:
    often, rest = np.divmod(np.diff(places, prepend=-1) - 1, _SKIPPED)
    skips = np.full(int(often.sum()) + places.size, _SKIPPED, np.uint8)
    skips[np.cumsum(often + 1) - 1] = rest
    to.put(struct.pack("<Q", skips.size))
    to.put_array(skips)


def _read_places(count: int, entries: int, reader: PayloadReader) -> NDArray[np.int64]:
    (size,) = struct.unpack("<Q", reader.take(8))
    if not count <= size <= count + entries // _SKIPPED:
        raise ValueError(f"{size} bytes for the places of {count} entries")
    skips = reader.array(np.uint8, size)
    places = np.cumsum(skips, dtype=np.int64)[skips < _SKIPPED] + np.arange(
        np.count_nonzero(skips < _SKIPPED)
    )
    if places.size != count or skips[-1] == _SKIPPED or places[-1] >= entries:
        raise ValueError(f"places that are not those of {count} of {entries} entries")
    return places
