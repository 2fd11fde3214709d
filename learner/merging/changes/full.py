"""Changes to the last bit: float64, byte by byte, of which the codec drops what is zero.

So float32(float64(anchor) + decoded) is the contributor's master, bit for bit. The difference of two
float32 that are near each other is a float32, whose lower bytes as a float64 are zero and cost nothing: 1.8
bytes an entry for a step of 1e-6. No float64 can do it where the master is below 2^-29 of the anchor, which
no single step makes of it (the sum is off by 2^-53 of the anchor at most), or where the master is -0.0 and
the anchor is not (the sum is 0.0).
"""

import math

import numpy as np
from numpy.typing import NDArray

from learner.merging.changes.payload_parts import PayloadReader, PayloadWriter


class FullCodec:
    """Hands in everything."""

    def write(self, change: NDArray[np.float64], shape: tuple[int, ...], to: PayloadWriter) -> None:
        """Append a change, flat."""
        to.put_array(change)

    def read(self, shape: tuple[int, ...], reader: PayloadReader) -> NDArray[np.float64]:
        """Return a change, flat."""
        return reader.array(np.float64, math.prod(shape))
