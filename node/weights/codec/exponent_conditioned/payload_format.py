"""The constants of the exponent-conditioned format (proto/WEIGHTS.md), its faults, and the coded delta.

The kernel has the same constants in node/weights/codec/native/format.h; a test compares them.
"""

import enum
from dataclasses import dataclass
from typing import Final

EXPONENT_SHIFT: Final = 7
EXPONENT_MASK: Final = 0xFF
"""Where the exponent is in a bfloat16. Words of another dtype are coded as exactly, only longer."""

INFINITY_BITS: Final = 0x7F80
"""The smallest bfloat16, sign aside, that is not finite."""

CLASSES: Final = 16
"""Exponents distinguished in one frame: as many as byte counters fit a 128-bit register."""

NUMBER_BITS: Final = 20
"""Low bits of the largest number; a frame has at most 2^20 words."""

GROWS_AT: Final = 8
"""Ones after which a number grows: enough not to lengthen gaps, few enough for the tail of sizes."""

LARGEST_STEP: Final = 1 << 15

FIRST_POSITIONS: Final = (7, -7)
FIRST_LARGE: Final = (7, -6)
FIRST_SIZE_BITS: Final = 6
"""The prediction for the first class of a frame: (width, mode), (width, mode), low bits."""

SAMPLE_BLOCK: Final = 1024
SAMPLE_WORDS: Final = 1 << 15
SAMPLE_CHANGES: Final = 32
"""The encoder's sample: words of a block, words in all, and the changes below which it takes all words."""

COST_ONES: Final = 24
"""The encoder compares parameters as if no number had more ones than this."""


class PayloadFault(enum.IntEnum):
    """Why a payload is refused. The kernel returns these numbers."""

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
    PayloadFault.NONE: "it is sound",
    PayloadFault.TRUNCATED: "it ends within a field",
    PayloadFault.TRAILING: "something follows its last field",
    PayloadFault.NUMBER: "a number is larger than any frame",
    PayloadFault.PARAMETER: "a parameter is out of range",
    PayloadFault.COUNT: "a class has no changes or more than there are words",
    PayloadFault.POSITION: "a change is past the last word of its class",
    PayloadFault.SIZE: "a step is larger than a word",
}


class BrokenPayloadError(Exception):
    """No encoder makes this payload."""

    def __init__(self, fault: PayloadFault) -> None:
        super().__init__(fault.meaning)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Delta:
    """A coded change from the base of a frame, with facts that coding found out about its words."""

    payload: bytes | None
    """Empty: nothing changed; None: it is over the limit."""
    changes: int
    digest: int
    """``words_digest`` of the words."""
    is_finite: bool
    """As bfloat16, no word is a NaN or an infinity."""
