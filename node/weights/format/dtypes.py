"""The dtypes a tensor may be published in: the width of an element, and which bits are a NaN or an infinity.

Their names are torch's. They are described by bits, because numpy has no bfloat16 and no 8-bit floats.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from node.weights.format.digests import Words


@dataclass(frozen=True, slots=True)
class Dtype:
    """One dtype. An element is not finite if its bits under ``mask`` lie from ``lowest`` to ``highest``."""

    name: str
    element_bytes: int
    is_floating: bool = False
    mask: int = 0
    lowest: int = 1
    highest: int = 1

    @property
    def unit_words(self) -> int:
        """The fewest words that hold whole elements."""
        return max(1, self.element_bytes // 2)

    def words(self, elements: int) -> int:
        """Return the words that so many elements take; spare bits of the last word are zero."""
        return (elements * self.element_bytes + 1) // 2

    def first_not_finite(self, words: Words) -> int | None:
        """Return the first element of ``words`` that is a NaN or an infinity; None if all are finite."""
        if not self.is_floating:
            return None
        bits = words.view(f"<u{self.element_bytes}") & self.mask
        found = np.flatnonzero((bits >= self.lowest) & (bits <= self.highest))
        return int(found[0]) if found.size else None


def _floating(name: str, element_bytes: int, infinity: int) -> Dtype:
    """Return a dtype whose bits, the sign aside, are not finite from ``infinity`` on."""
    mask = (1 << (8 * element_bytes - 1)) - 1
    return Dtype(name, element_bytes, is_floating=True, mask=mask, lowest=infinity, highest=mask)


def _floating_with_one_nan(name: str, nan: int) -> Dtype:
    return Dtype(name, 1, is_floating=True, mask=0xFF, lowest=nan, highest=nan)


BFLOAT16: Final = _floating("bfloat16", 2, 0x7F80)

DTYPES: Final = {
    dtype.name: dtype
    for dtype in (
        BFLOAT16,
        _floating("float16", 2, 0x7C00),
        _floating("float32", 4, 0x7F80_0000),
        _floating("float64", 8, 0x7FF0_0000_0000_0000),
        _floating("float8_e4m3fn", 1, 0x7F),
        _floating("float8_e5m2", 1, 0x7C),
        _floating_with_one_nan("float8_e4m3fnuz", 0x80),
        _floating_with_one_nan("float8_e5m2fnuz", 0x80),
        _floating_with_one_nan("float8_e8m0fnu", 0xFF),
        *(Dtype(f"{sign}int{8 * size}", size) for sign in ("", "u") for size in (1, 2, 4, 8)),
        Dtype("bool", 1),
    )
}
"""By name."""
