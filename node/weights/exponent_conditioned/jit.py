"""The exponent-conditioned codec compiled by numba, for machines without a C compiler: the ``jit`` extra.

    encode   find (jit_words) -> write (jit_encode)
    decode   read (jit_decode) -> apply (jit_words)

Compiled at the first frame, which takes about ten seconds.
"""

import threading
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from node.weights.digests import Words, words_digest
from node.weights.exponent_conditioned import jit_decode, jit_encode, jit_words
from node.weights.exponent_conditioned.format import CLASSES, BrokenPayloadError, Delta, Fault

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
    base_fours, words_fours = jit_words.fours(base), jit_words.fours(words)
    is_finite = bool(jit_words.are_finite(words))
    first = jit_encode.first_exponent(base, words)
    found_class = _room.array("class", words.size, np.uint8)
    found_gap = _room.array("gap", words.size, np.uint32)
    found_step = _room.array("step", words.size, np.uint16)
    found = jit_words.find(
        base,
        words,
        base_fours,
        words_fours,
        *jit_words.class_tables(first),
        found_class,
        found_gap,
        found_step,
    )
    payload: bytes | None = b""
    if found:
        out = _room.array("payload", limit_bytes, np.uint8)
        size = jit_encode.write(first, found_class[:found], found_gap[:found], found_step[:found], out)
        payload = out[:size].tobytes() if size <= limit_bytes else None
    return Delta(payload, changes=found, digest=words_digest(words), is_finite=is_finite)


def decode(payload: bytes, *, base: Words, out: Words) -> int:
    """Make the words in ``out``, and give their digest.

    Raises:
        BrokenPayloadError: no encoder makes this payload; ``out`` is worthless.
    """
    padded = np.frombuffer(payload + bytes(jit_decode.PADDING_BYTES), np.uint8)
    ranks = _room.array("ranks", out.size + CLASSES, np.int32)
    steps = _room.array("steps", out.size + CLASSES, np.uint16)
    large = _room.array("large", out.size, np.int32)
    starts = np.empty(CLASSES + 1, np.int64)
    first = jit_decode.read(padded, len(payload), out.size, ranks, steps, large, starts)
    if first < 0:
        raise BrokenPayloadError(Fault(-first))
    is_complete = jit_words.apply(
        base,
        out,
        jit_words.fours(base),
        jit_words.fours(out),
        *jit_words.class_tables(first),
        ranks,
        steps,
        starts,
    )
    if not is_complete:
        raise BrokenPayloadError(Fault.POSITION)
    return words_digest(out)
