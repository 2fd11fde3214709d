"""What the three implementations of the exponent-conditioned codec share: the numbers of proto/WEIGHTS.md."""

import enum
from typing import Final

EXPONENT_SHIFT: Final = 7
"""A bfloat16 has 7 bits of mantissa below its exponent."""

EXPONENT_MASK: Final = 0xFF

CLASSES: Final = 16
"""Exponents told apart in one frame. Their populations fit the 16 bytes of one vector register."""

WORDS_MOST: Final = 1 << 20
"""Words of the largest frame; a rank within one is below this."""

NUMBER_BITS: Final = 20
"""Low bits of the largest number. With its unary part it fits one 64-bit load at any bit."""

GROWS_AT: Final = 8
"""Ones of the unary part after which a number has more low bits: heavy tails cost twice their logarithm."""

ONES_MOST: Final = GROWS_AT + NUMBER_BITS

FIRST_POSITION_WIDTH: Final = 7
FIRST_POSITION_MODE: Final = -7
FIRST_LARGE_WIDTH: Final = 7
FIRST_LARGE_MODE: Final = -6
FIRST_SIZE_BITS: Final = 10
"""What the first class is predicted to be; measured on trained weights at 0.3-3 % density."""

LARGEST_SIZE: Final = 1 << 15
"""Size of the largest step; it exists downwards only, as in two's complement."""

SAMPLE_BLOCK: Final = 1024
SAMPLE_WORDS: Final = 1 << 16
SAMPLE_CHANGES: Final = 32
"""How the encoder looks for the first exponent: blocks of so many words, about so many words in all;
every word, if so few changes were seen that their exponents say little."""

UNREAD: Final = 24
"""Unary length at which the encoder stops counting when it compares low bits: a guess is enough."""


class Fault(enum.IntEnum):
    """Why a payload is refused; the kernel returns these numbers."""

    NONE = 0
    TRUNCATED = 1
    TRAILING = 2
    NUMBER = 3
    PARAMETER = 4
    COUNT = 5
    POSITION = 6
    SIZE = 7

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]


_MEANINGS: Final = {
    Fault.NONE: "it is sound",
    Fault.TRUNCATED: "it ends in the middle of a field",
    Fault.TRAILING: "something follows the last class",
    Fault.NUMBER: "a number is larger than any frame",
    Fault.PARAMETER: "a parameter is out of its range",
    Fault.COUNT: "more changes are announced than there are words, or none",
    Fault.POSITION: "a change lies past the last word of its class",
    Fault.SIZE: "a step is larger than a word",
}
