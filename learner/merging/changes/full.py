"""Changes to the last bit: float32 where it holds the float64 difference, float64 where it does not.

    for every 2^19 entries:   differences rounded to float32 | u32: entries that are not exact so
                              and if there are any: which they are, a bit each | their float64

So float32(float64(anchor) + decoded) is the contributor's master, bit for bit. Most differences are
float32: those of two numbers within a factor of two always are. No float64 can do it where the master is
below 2^-29 of the anchor, which no single step makes of it (the sum is off by 2^-53 of the anchor at most),
or where the master is -0.0 and the anchor is not (the sum is 0.0).
"""

import math
import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from learner.merging.changes.payload_parts import PayloadReader, PayloadWriter

_ENTRIES: Final = 1 << 19
"""As many float32 as fill a frame: temporaries stay small, whatever the tensor."""


class FullCodec:
    """Hands in everything."""

    def write(self, change: NDArray[np.float64], shape: tuple[int, ...], to: PayloadWriter) -> None:
        """Append a change, flat."""
        for start in range(0, change.size, _ENTRIES):
            part = change[start : start + _ENTRIES]
            with np.errstate(over="ignore"):
                rounded = part.astype(np.float32)
            rounded[~np.isfinite(rounded)] = 0
            is_inexact = rounded != part
            to.put_array(rounded)
            to.put(struct.pack("<I", np.count_nonzero(is_inexact)))
            if is_inexact.any():
                to.put_array(np.packbits(is_inexact))
                to.put_array(part[is_inexact])

    def read(self, shape: tuple[int, ...], reader: PayloadReader) -> NDArray[np.float64]:
        """Return a change, flat."""
        change = np.empty(math.prod(shape), np.float64)
        for start in range(0, change.size, _ENTRIES):
            part = change[start : start + _ENTRIES]
            part[:] = reader.array(np.float32, part.size)
            (inexact,) = struct.unpack("<I", reader.take(4))
            if inexact:
                is_inexact = np.unpackbits(reader.array(np.uint8, (part.size + 7) // 8))
                if np.count_nonzero(is_inexact) != inexact or is_inexact[part.size :].any():
                    raise ValueError("the entries that are not exact as float32 are not as many as it says")
                part[is_inexact[: part.size].view(np.bool_)] = reader.array(np.float64, inexact)
        return change
