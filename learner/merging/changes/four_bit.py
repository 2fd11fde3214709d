"""Changes at 4 bits an entry: x becomes s round(x / s), in [-7, 7], with s = max|x| / 7 of each 256 entries.

    for every 2^20 entries:   s of each block, float32 | levels plus 7, two a byte, the first one low

A scale for each block rather than for the tensor: rows of an embedding that were seen change by orders of
magnitude more than others, and a common scale would round those to zero until feedback catches up. Blocks of
256 cost an eighth of a bit an entry, blocks of 64 half a bit.

Source: s is DiLoCoX's, arXiv:2506.21263.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from learner.merging.changes.payload_parts import PayloadReader, PayloadWriter

_BLOCK: Final = 256
_ENTRIES: Final = 1 << 20
_LARGEST: Final = 7


class FourBitCodec:
    """Hands in every entry, coarsely."""

    def write(self, change: NDArray[np.float32], shape: tuple[int, ...], to: PayloadWriter) -> None:
        """Append a change, flat, and take off what is handed in."""
        for start in range(0, change.size, _ENTRIES):
            part = change[start : start + _ENTRIES]
            blocks = np.zeros((_block_count(part.size), _BLOCK), np.float32)
            blocks.reshape(-1)[: part.size] = part
            scales = np.abs(blocks).max(axis=1) / np.float32(_LARGEST)
            divisors = np.where(scales > 0, scales, np.float32(np.inf))
            levels = np.rint(blocks / divisors[:, np.newaxis]).clip(-_LARGEST, _LARGEST)
            codes = (levels.ravel()[: part.size + part.size % 2] + _LARGEST).astype(np.uint8)
            to.put_array(scales)
            to.put_array(codes[::2] | codes[1::2] << 4)
            part -= (levels * scales[:, np.newaxis]).ravel()[: part.size]

    def read(self, shape: tuple[int, ...], reader: PayloadReader) -> NDArray[np.float64]:
        """Return a change, flat."""
        change = np.empty(math.prod(shape), np.float64)
        for start in range(0, change.size, _ENTRIES):
            part = change[start : start + _ENTRIES]
            scales = reader.array(np.float32, _block_count(part.size))
            pairs = reader.array(np.uint8, (part.size + 1) // 2)
            codes = np.stack((pairs & 0xF, pairs >> 4), axis=1).ravel()[: part.size]
            if (codes > 2 * _LARGEST).any() or (scales < 0).any():
                raise ValueError("a level or a scale that no encoder makes")
            part[:] = codes
            part -= _LARGEST
            part *= np.repeat(scales, _BLOCK)[: part.size]
        return change


def _block_count(entries: int) -> int:
    return -(-entries // _BLOCK)
