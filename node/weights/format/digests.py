"""The three digests that identify weights.

    words     8 bytes, xxh3: detects accidents (a wrong base, a flipped bit, a codec fault) at memory speed;
              half of it, the check, identifies the damaged frame
    payload  16 bytes, BLAKE3: a stranger cannot make other bytes with the same digest
    root     16 bytes, BLAKE3 over the layout and the digests of all frames: identifies a whole version

Why two kinds: DECISIONS.md, "Two digests per frame".
"""

from collections.abc import Iterable
from typing import Final

import blake3
import numpy as np
import xxhash
from numpy.typing import NDArray

from node.values.policy import ROOT_BYTES

Words = NDArray[np.uint16]
"""The bits of tensors, 16 at a time; little-endian, as every machine this runs on."""

PAYLOAD_DIGEST_BYTES: Final = 16
LAYOUT_DIGEST_BYTES: Final = 16


def words_digest(words: Words) -> int:
    """Return the unsigned 64-bit digest of contiguous ``words``."""
    return xxhash.xxh3_64_intdigest(words.data)


def words_check(digest: int) -> int:
    """Return the unsigned 32 bits of a words digest that a manifest has for each frame.

    They tell which frame is wrong. The root, made of whole digests, proves that none is.
    """
    return digest & 0xFFFFFFFF


def payload_digest(payload: bytes) -> bytes:
    """Return the PAYLOAD_DIGEST_BYTES bytes that authenticate a payload."""
    return blake3.blake3(payload).digest(length=PAYLOAD_DIGEST_BYTES)


def version_root(layout_digest: bytes, frame_digests: Iterable[int]) -> bytes:
    """Return the ROOT_BYTES bytes that identify a version, from its layout and its frames' words digests."""
    digests = np.fromiter(frame_digests, dtype="<u8")
    return blake3.blake3(layout_digest + digests.tobytes()).digest(length=ROOT_BYTES)
