"""The loops over words of jit.py: find the changes of a frame, apply them.

    piece   passes that become vector instructions write down, of each word, in bytes: its class, as the
            place of a nibble in 64 bits; finding, whether it changed
    block   its words are counted by class: a unit in the nibble of each, eight nibbles added to bytes
    change  finding, its rank is that of its block and the words of its class before it in the block;
            applying, only blocks that reach the next rank of a class are searched for its word

Integers of 64 bits are kept apart by sign throughout: numba makes a float of a mixture.
"""

from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from node.weights.exponent_conditioned.format import CLASSES, EXPONENT_MASK, EXPONENT_SHIFT, INFINITY_BITS

P = ParamSpec("P")
R = TypeVar("R")
Array = NDArray[Any]
Number = Any
"""An integer of numpy or of Python: numba has one kind of each width."""

_EIGHT: Final = 8
"""Bytes of the 64 bits that are looked at together."""

BLOCK_WORDS: Final = 192
"""So few that a byte counts them; more cost more per change, less more per word."""
_BLOCK_EIGHTS = BLOCK_WORDS // _EIGHT

PIECE_WORDS: Final = 16 * BLOCK_WORDS
"""What one pass leaves to the next is still in the first-level cache."""

# Of the words' own type: only so do loops over words become vector instructions, four times as fast.
_EXPONENT_SHIFT, _EXPONENT_MASK = np.uint16(EXPONENT_SHIFT), np.uint16(EXPONENT_MASK)
_EXPONENT_BITS = np.uint16(INFINITY_BITS)
_LAST_CLASS, _NO_WORD = np.uint16(CLASSES - 1), np.uint16(0)
_NIBBLE_BITS: Final = 2
"""A class times 4 is the place of its nibble."""
_TIMES_NIBBLE = np.uint16(_NIBBLE_BITS)
_PLACES = np.arange(BLOCK_WORDS, dtype=np.uint8)

_ZERO, _ONE, _FOUR, _SEVEN, _TOP_BYTE = (np.uint64(number) for number in (0, 1, 4, 7, 56))
_BYTE = np.uint64(0xFF)
_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
_BYTES = np.uint64(0x0101010101010101)
_HIGH_BITS = np.uint64(0x8080808080808080)


_njit: Any = numba.njit
"""As the types of numba have it, it takes fewer options."""


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile at the first call; run without the interpreter lock.

    Nothing is kept on disk: numba would not notice that a number in format.py changed.
    """
    dispatcher: Callable[P, R] = _njit(nogil=True)(function)
    return dispatcher


def part(function: Callable[P, R]) -> Callable[P, R]:
    """Compile what only compiled functions call: without the entry from Python, a fifth sooner."""
    dispatcher: Callable[P, R] = _njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    return dispatcher


@part
def count_ones(bits: np.uint64) -> Number:
    """Give how many bits are set."""
    # LLVM knows this loop, and makes one instruction of it.
    ones = 0
    while bits:
        bits &= bits - _ONE
        ones += 1
    return ones


@part
def _nibble_of(word: np.uint16, first: np.uint16) -> np.uint8:
    exponent = np.uint16(word >> _EXPONENT_SHIFT & _EXPONENT_MASK)
    number = np.uint16(exponent - first) if exponent > first else _NO_WORD
    return np.uint8((number if number < _LAST_CLASS else _LAST_CLASS) << _TIMES_NIBBLE)


@part
def _look(base: Array, words: Array, first: np.uint16, nibbles: Array, changed: Array) -> np.uint16:
    """Write down the nibble of each word and whether it changed; give the largest exponent, in its place."""
    largest = _NO_WORD
    for place in range(base.size):
        nibbles[place] = _nibble_of(base[place], first)
        changed[place] = base[place] != words[place]
        exponent = np.uint16(words[place] & _EXPONENT_BITS)
        largest = exponent if exponent > largest else largest
    return largest


@part
def _copy(base: Array, out: Array, first: np.uint16, nibbles: Array) -> None:
    for place in range(base.size):
        nibbles[place] = _nibble_of(base[place], first)
        out[place] = base[place]


@part
def _count(nibbles: Array) -> tuple[np.uint64, np.uint64]:
    """Count the words of a block, a byte for each class: the even ones, the odd ones."""
    even = odd = _ZERO
    for lane in range(_BLOCK_EIGHTS):
        units = _ZERO
        for row in range(_EIGHT):
            units += _ONE << np.uint64(nibbles[row * _BLOCK_EIGHTS + lane])
        even += units & _NIBBLES
        odd += units >> _FOUR & _NIBBLES
    return even, odd


@part
def _list_nonzero(eights: Array, listed: Array) -> None:
    """List the places of what is not zero, and ``eights.size``."""
    count = 0
    for place in range(eights.size):
        # Written over by the next one unless it counts: no branch that nobody could predict.
        listed[count] = place
        count += eights[place] != _ZERO
    listed[count] = eights.size


@part
def _count_before(nibbles: Array, nibble: np.uint8, place: np.uint8) -> Number:
    """Count the words of a class before ``place`` of a block."""
    count = np.uint8(0)
    for other in range(BLOCK_WORDS):
        count = np.uint8(count + np.uint8((nibbles[other] == nibble) & (_PLACES[other] < place)))
    return np.int64(count)


@compiled
def find(
    base: Array,
    words: Array,
    first: Number,
    nibbles: Array,
    changed: Array,
    changed_eights: Array,
    listed: Array,
    seen: Array,
    after_last: Array,
    found_class: Array,
    found_gap: Array,
    found_step: Array,
) -> tuple[Number, bool]:
    """List the changes in the order of their places: class, unchanged words of it before, step.

    Args:
        nibbles, changed: PIECE_WORDS bytes; ``changed_eights`` are the same as the latter.
        listed: an integer for each of those eights, and one more.
        seen, after_last: CLASSES zeros.
    Returns:
        How many there are, and whether no word, taken as bfloat16, has all exponent bits set.
    """
    largest = _NO_WORD
    found = 0
    for start in range(0, base.size, PIECE_WORDS):
        end = min(start + PIECE_WORDS, base.size)
        piece_base, piece_words = base[start:end], words[start:end]
        exponent = _look(piece_base, piece_words, np.uint16(first), nibbles, changed)
        largest = exponent if exponent > largest else largest
        blocks = -(-(end - start) // BLOCK_WORDS)
        changed[end - start : blocks * BLOCK_WORDS] = False
        _list_nonzero(changed_eights[: blocks * _BLOCK_EIGHTS], listed)
        next_listed = 0
        for block in range(blocks):
            block_start = block * BLOCK_WORDS
            block_nibbles = nibbles[block_start : block_start + BLOCK_WORDS]
            while listed[next_listed] < (block + 1) * _BLOCK_EIGHTS:
                eight = listed[next_listed]
                next_listed += 1
                flags = changed_eights[eight]
                while flags:
                    lowest = flags & (~flags + _ONE)
                    flags ^= lowest
                    place = _EIGHT * eight + (count_ones(lowest - _ONE) >> 3)
                    nibble = nibbles[place]
                    number = nibble >> _NIBBLE_BITS
                    rank = seen[number]
                    rank += _count_before(block_nibbles, nibble, np.uint8(place - block_start))
                    found_class[found] = number
                    found_gap[found] = rank - after_last[number]
                    found_step[found] = piece_words[place] - piece_base[place]
                    after_last[number] = rank + 1
                    found += 1
            even, odd = _count(block_nibbles)
            for pair in range(CLASSES // 2):
                shift = np.uint64(8 * pair)
                seen[2 * pair] += np.int64(even >> shift & _BYTE)
                seen[2 * pair + 1] += np.int64(odd >> shift & _BYTE)
    return found, bool(largest < _EXPONENT_BITS)


@part
def _find_ranked(nibbles: Array, nibble: np.uint8, rank: Number) -> Number:
    """Give the place of the word that has ``rank`` among those of its class in a block."""
    pattern = np.uint64(nibble) * _BYTES
    eight = 0
    while True:
        # Below 128, a byte leaves the high bit unless it is zero.
        same = _HIGH_BITS - (nibbles[eight] ^ pattern) & _HIGH_BITS
        count = count_ones(same)
        if rank < count:
            break
        rank -= count
        eight += 1
    up_to = (same >> _SEVEN) * _BYTES
    return _EIGHT * eight + count_ones((np.uint64(rank) * _BYTES | _HIGH_BITS) - up_to & _HIGH_BITS)


@compiled
def apply(
    base: Array,
    out: Array,
    first: Number,
    nibbles: Array,
    nibble_eights: Array,
    ranks: Array,
    steps: Array,
    starts: Array,
    cursors: Array,
    left: Array,
    reached: Array,
) -> bool:
    """Make the words; say whether every change found its word.

    Args:
        nibbles: PIECE_WORDS bytes; ``nibble_eights`` are the same.
        starts: where the ranks of each class start; they end with one that no word has.
        cursors, left: room for CLASSES integers.
        reached: for one more.
    """
    for number in range(CLASSES):
        cursors[number] = starts[number]
        left[number] = ranks[starts[number]]
    for start in range(0, base.size, PIECE_WORDS):
        piece_base, piece_out = base[start : start + PIECE_WORDS], out[start : start + PIECE_WORDS]
        _copy(piece_base, piece_out, np.uint16(first), nibbles)
        for block_start in range(0, piece_base.size, BLOCK_WORDS):
            even, odd = _count(nibbles[block_start : block_start + BLOCK_WORDS])
            signs = 0
            for pair in range(CLASSES // 2):
                shift = np.uint64(8 * pair)
                left[2 * pair] -= np.int64(even >> shift & _BYTE)
                left[2 * pair + 1] -= np.int64(odd >> shift & _BYTE)
                signs |= left[2 * pair] | left[2 * pair + 1]
            if signs >= 0:
                continue
            eights = nibble_eights[block_start // _EIGHT : block_start // _EIGHT + _BLOCK_EIGHTS]
            count = 0
            for number in range(CLASSES):
                reached[count] = number
                count += left[number] < 0
            for number in reached[:count]:
                counts = even if number & 1 == 0 else odd
                words = np.int64(counts >> np.uint64(8 * (number >> 1)) & _BYTE)
                while left[number] < 0:
                    place = block_start
                    place += _find_ranked(eights, np.uint8(number << _NIBBLE_BITS), left[number] + words)
                    # What is past the end of the frame was left there by another piece.
                    if place >= piece_out.size:
                        return False
                    cursor = cursors[number]
                    piece_out[place] = piece_base[place] + steps[cursor]
                    left[number] += ranks[cursor + 1] - ranks[cursor]
                    cursors[number] = cursor + 1
    missed = 0
    for number in range(CLASSES):
        missed += starts[number + 1] - 1 - cursors[number]
    return missed == 0
