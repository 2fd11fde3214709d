"""The exponent-conditioned codec compiled by numba, for machines without AVX-512 or C: the ``jit`` extra.

    encode   find (jit_words) -> write (jit_encode)
    decode   read (jit_decode) -> apply (jit_words)

Compiled at the first frame: 2.5 s to encode, 1.5 s to decode.
"""

import threading
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from node.weights.digests import Words, words_digest
from node.weights.exponent_conditioned import jit_decode, jit_encode, jit_words
from node.weights.exponent_conditioned.format import (
    CLASSES,
    EXPONENT_MASK,
    BrokenPayloadError,
    Delta,
    Fault,
)

name: Final = "numba"


class _Room(threading.local):
    """Memory of one thread, kept from frame to frame: new pages cost a tenth of a frame's time."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}

    def array(self, name: str, size: int, dtype: DTypeLike) -> NDArray[Any]:
        """Give an array of ``size``; what is in it is what was left there."""
        kept = self._arrays.get(name)
        if kept is None or kept.size < size:
            kept = self._arrays[name] = np.empty(size, dtype)
        return kept[:size]


_room = _Room()


def encode(words: Words, *, base: Words, limit_bytes: int) -> Delta:
    """Code ``words``."""
    first = jit_encode.first_exponent(base, words, np.empty(EXPONENT_MASK + 1, np.int64))
    changed = _room.array("changed", jit_words.PIECE_WORDS // 8, np.uint64)
    found_class = _room.array("class", words.size, np.uint8)
    found_gap = _room.array("gap", words.size, np.uint32)
    found_step = _room.array("step", words.size, np.uint16)
    found, is_finite = jit_words.find(
        base,
        words,
        first,
        _room.array("nibbles", jit_words.PIECE_WORDS // 8, np.uint64).view(np.uint8),
        changed.view(np.uint8),
        changed,
        _room.array("listed", changed.size + 1, np.int32),
        np.zeros(CLASSES, np.int64),
        np.zeros(CLASSES, np.int64),
        found_class,
        found_gap,
        found_step,
    )
    payload: bytes | None = b""
    if found:
        out = _room.array("payload", limit_bytes // 8 + 1, np.uint64)
        size = jit_encode.write(
            first,
            found_class[:found],
            found_gap[:found],
            found_step[:found],
            np.zeros(CLASSES + 1, np.int64),
            jit_encode.FIRST_PREDICTIONS.copy(),
            _room.array("gaps", found, np.uint32),
            _room.array("steps", found, np.uint16),
            _room.array("sizes", found, np.uint32),
            _room.array("runs", found, np.uint32),
            out,
        )
        payload = out.view(np.uint8)[:size].tobytes() if size <= limit_bytes else None
    return Delta(payload, changes=found, digest=words_digest(words), is_finite=is_finite)


def decode(payload: bytes, *, base: Words, out: Words) -> int:
    """Make the words in ``out``, and give their digest.

    Raises:
        BrokenPayloadError: no encoder makes this payload; ``out`` is worthless.
    """
    padded_bytes = len(payload) + -len(payload) % 8 + jit_decode.PADDING_BYTES
    ranks = _room.array("ranks", out.size + CLASSES, np.int32)
    steps = _room.array("steps", out.size + CLASSES, np.uint16)
    starts = np.empty(CLASSES + 1, np.int64)
    first = jit_decode.read(
        np.frombuffer(payload.ljust(padded_bytes, b"\0"), np.uint64),
        len(payload),
        out.size,
        jit_encode.FIRST_PREDICTIONS.copy(),
        ranks,
        steps,
        _room.array("large", out.size, np.int32),
        starts,
    )
    if first < 0:
        raise BrokenPayloadError(Fault(-first))
    nibbles = _room.array("nibbles", jit_words.PIECE_WORDS // 8, np.uint64)
    is_complete = jit_words.apply(
        base,
        out,
        first,
        nibbles.view(np.uint8),
        nibbles,
        ranks,
        steps,
        starts,
        np.empty(CLASSES, np.int64),
        np.empty(CLASSES, np.int64),
        np.empty(CLASSES + 1, np.int64),
    )
    if not is_complete:
        raise BrokenPayloadError(Fault.POSITION)
    return words_digest(out)
