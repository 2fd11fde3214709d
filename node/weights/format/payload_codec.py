"""The codecs a frame may be coded with, and the size limit of their payloads.

``node.weights.codec.frame_codec`` encodes and decodes them.
"""

import enum


class Codec(enum.IntEnum):
    """How a frame is coded. The numbers are on the wire."""

    UNCHANGED = 0
    RAW = 1
    GAP = 2
    EXPONENT_CONDITIONED = 3
    KEYFRAME = 4
    PLANES = 5
    STEP_PLANES = 6

    @property
    def needs_base(self) -> bool:
        return self in (Codec.UNCHANGED, Codec.GAP, Codec.EXPONENT_CONDITIONED, Codec.STEP_PLANES)


def payload_limit(codec: Codec, words: int) -> int:
    """Return the most payload bytes an honest encoder makes of ``words``: beyond, it falls back to RAW."""
    return 0 if codec is Codec.UNCHANGED else 2 * words
