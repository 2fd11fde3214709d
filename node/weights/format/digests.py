"""The three digests weights are known by.

    words     8 bytes, xxh3: finds accidents (a wrong base, a flipped bit, a codec fault) at memory speed;
              half of it, the check, tells which frame has one
    payload  16 bytes, BLAKE3: a stranger cannot make other bytes with it
    root     16 bytes, BLAKE3 over the layout and the digests of all frames: names a whole version

Why two kinds: DESIGN.md, "Two digests per frame".
"""

from collections.abc import Iterable
from typing import Final

import blake3
import numpy as np
import xxhash
from numpy.typing import NDArray

from node.policy import ROOT_BYTES

Words = NDArray[np.uint16]
"""Tensors by their bits, 16 at a time; little-endian, as on every machine this runs on."""

PAYLOAD_DIGEST_BYTES: Final = 16
LAYOUT_DIGEST_BYTES: Final = 16


def words_digest(words: Words) -> int:
    """Give the unsigned 64-bit digest of contiguous ``words``."""
    return xxhash.xxh3_64_intdigest(words.data)


def words_check(digest: int) -> int:
    """Give the unsigned 32 bits of a words digest that a manifest has for each frame.

    They say which frame is wrong; that none is, the root says, which is made of whole digests.
    """
    return digest & 0xFFFFFFFF


def payload_digest(payload: bytes) -> bytes:
    """Give the PAYLOAD_DIGEST_BYTES bytes that a payload is authentic by."""
    return blake3.blake3(payload).digest(length=PAYLOAD_DIGEST_BYTES)


def version_root(layout_digest: bytes, frame_digests: Iterable[int]) -> bytes:
    """Give the ROOT_BYTES bytes that name a version: the layout and every frame's words digest, in order."""
    digests = np.fromiter(frame_digests, dtype="<u8")
    return blake3.blake3(layout_digest + digests.tobytes()).digest(length=ROOT_BYTES)
