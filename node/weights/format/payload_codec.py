"""The codecs a frame may be coded with, and the size limit of their payloads.

``node.weights.codec.frame_codec`` encodes and decodes them.
"""

import enum


class Codec(enum.IntEnum):
    """How a frame is coded. The numbers are on the wire."""

    UNCHANGED = 0
    RAW = 1
    EXPONENT_CONDITIONED = 2
    KEYFRAME = 3
    PLANES = 4
    STEP_PLANES = 5

    @property
    def needs_base(self) -> bool:
        return self in (Codec.UNCHANGED, Codec.EXPONENT_CONDITIONED, Codec.STEP_PLANES)


def payload_limit(codec: Codec, words: int) -> int:
    """Return the most payload bytes an honest encoder makes of ``words``: beyond, it falls back to RAW."""
    return 0 if codec is Codec.UNCHANGED else 2 * words
