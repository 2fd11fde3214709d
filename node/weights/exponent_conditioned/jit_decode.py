"""The decoder's half of jit.py: bits -> changes. Every number is checked before it is used.

What numba compiles raises nothing of ours: a function gives what it read, or a fault as a negative number.
A bit stream is its 64-bit integers, ``at``, where it is read, and ``end``, both in bits; what reads from it
gives where to go on, too.
"""

import numpy as np

from node.weights.exponent_conditioned.format import (
    CLASSES,
    GROWS_AT,
    LARGEST_STEP,
    NUMBER_BITS,
    Fault,
)
from node.weights.exponent_conditioned.jit_words import Array, Number, compiled, count_ones, part

PADDING_BYTES = 16
"""Zeros that must follow a payload, at least, so that sixteen bytes can be read anywhere."""

NO_RANK = np.iinfo(np.int32).max
"""Ends the ranks of a class."""

_TRUNCATED, _TRAILING, _NUMBER, _PARAMETER, _COUNT, _POSITION, _SIZE = (
    np.int64(-fault) for fault in Fault if fault is not Fault.NONE
)
# Of numpy, for the reason that jit_encode has.
_NONE, _BYTE_BITS, _CLASSES = (np.int64(number) for number in (0, 8, CLASSES))
_POSITIONS, _LARGE, _SIZE_BITS = (np.int64(number) for number in (0, 2, 4))
_ONE, _SIX, _LAST_BIT = np.uint64(1), np.uint64(6), np.uint64(63)


@part
def _peek(payload: Array, at: Number) -> np.uint64:
    """Give the next 64 bits."""
    # An index without a sign: else numba looks whether it counts from the end.
    word, shift = np.uint64(at) >> _SIX, np.uint64(at) & _LAST_BIT
    window: np.uint64 = payload[word] >> shift | payload[word + _ONE] << _ONE << (_LAST_BIT - shift)
    return window


@part
def _take(payload: Array, at: Number, end: Number, width: Number) -> tuple[Number, Number]:
    """Read up to 56 bits."""
    value = np.int64(_peek(payload, at) & (_ONE << np.uint64(width)) - _ONE)
    at += width
    return at, value if at <= end else _TRUNCATED


@part
def _take_number(payload: Array, at: Number, end: Number, low_bits: Number) -> tuple[Number, Number]:
    window = _peek(payload, at)
    ones = count_ones(window & ~(window + _ONE))
    start, width = ones, low_bits
    if ones >= GROWS_AT:
        width += ones - GROWS_AT
        if width > NUMBER_BITS:
            return at, _NUMBER
        start = GROWS_AT - 1 + (1 << ones - GROWS_AT)
    low = np.int64(window >> np.uint64(ones + 1) & (_ONE << np.uint64(width)) - _ONE)
    at += ones + 1 + width
    return at, (start << low_bits) + low if at <= end else _TRUNCATED


@part
def _change_by_surprise(
    payload: Array, at: Number, end: Number, predictions: Array, which: Number
) -> tuple[Number, Number]:
    at, zigzag = _take_number(payload, at, end, _NONE)
    if zigzag < 0:
        return at, zigzag
    predictions[which] += zigzag >> 1 if zigzag & 1 == 0 else -(zigzag + 1 >> 1)
    return at, _NONE


@part
def _take_gaps(
    payload: Array, at: Number, end: Number, low_bits: Number, bound: Number, members: Array
) -> tuple[Number, Number]:
    member = -1
    for place in range(members.size):
        at, gap = _take_number(payload, at, end, low_bits)
        if gap < 0:
            return at, gap
        member += 1 + gap
        if member >= bound:
            return at, _POSITION
        members[place] = member
    return at, members.size


@part
def _take_runs(
    payload: Array, at: Number, end: Number, low_bits: Number, bound: Number, members: Array
) -> tuple[Number, Number]:
    place = start = 0
    while place < members.size:
        at, run = _take_number(payload, at, end, low_bits)
        if run < 0:
            return at, run
        # Each run ends with a word that is no member, so that empty runs come to an end too.
        if run > members.size - place or start + run > bound:
            return at, _POSITION
        for member in range(start, start + run):
            members[place] = member
            place += 1
        start += run + 1
    return at, members.size


@part
def _take_subset(
    payload: Array,
    at: Number,
    end: Number,
    predictions: Array,
    which: Number,
    most: Number,
    bound: Number,
    members: Array,
) -> tuple[Number, Number]:
    """Read up to ``most`` ascending members below ``bound``; give how many."""
    at, fault = _change_by_surprise(payload, at, end, predictions, which)
    if fault < 0:
        return at, fault
    width = predictions[which]
    if not 0 <= width <= NUMBER_BITS + 1:
        return at, _PARAMETER
    if width == 0:
        return at, _NONE
    at, low = _take(payload, at, end, width - 1)
    if low < 0:
        return at, low
    count = 1 << width - 1 | low
    if count > most:
        return at, _COUNT
    predictions[which + 1] += 1
    at, fault = _change_by_surprise(payload, at, end, predictions, which + 1)
    if fault < 0:
        return at, fault
    mode = predictions[which + 1]
    low_bits = mode if mode >= 0 else -1 - mode
    if low_bits > NUMBER_BITS:
        return at, _PARAMETER
    if mode >= 0:
        return _take_gaps(payload, at, end, low_bits, bound, members[:count])
    return _take_runs(payload, at, end, low_bits, bound, members[:count])


@part
def _take_class(
    payload: Array,
    at: Number,
    end: Number,
    predictions: Array,
    words_left: Number,
    words: Number,
    ranks: Array,
    steps: Array,
    large: Array,
) -> tuple[Number, Number]:
    """Read the changes of one class; give how many."""
    at, count = _take_subset(payload, at, end, predictions, _POSITIONS, words_left, words, ranks)
    if count <= 0:
        return at, count if count < 0 else _COUNT
    if at + count > end:
        return at, _TRUNCATED
    for change in range(count):
        bit = np.uint64(at + change)
        is_down = np.int64(payload[bit >> _SIX] >> (bit & _LAST_BIT) & _ONE)
        steps[change] = 1 - 2 * is_down
    at += count
    at, large_count = _take_subset(payload, at, end, predictions, _LARGE, count, count, large)
    if large_count <= 0:
        return at, large_count if large_count < 0 else count
    predictions[_SIZE_BITS] -= 1
    at, fault = _change_by_surprise(payload, at, end, predictions, _SIZE_BITS)
    if fault < 0:
        return at, fault
    size_bits = predictions[_SIZE_BITS]
    if not 0 <= size_bits <= NUMBER_BITS:
        return at, _PARAMETER
    for change in large[:large_count]:
        at, number = _take_number(payload, at, end, size_bits)
        if number < 0:
            return at, number
        # As in two's complement, the largest step goes down only.
        is_down = steps[change] != 1
        if number + 2 >= LARGEST_STEP + is_down:
            return at, _SIZE
        steps[change] = -(number + 2) if is_down else number + 2
    return at, count


@compiled
def read(
    payload: Array,
    payload_bytes: Number,
    words: Number,
    predictions: Array,
    ranks: Array,
    steps: Array,
    large: Array,
    starts: Array,
) -> Number:
    """Read all changes; give the exponent of class 0.

    ``starts[c]`` is where class c begins in ``ranks`` and ``steps``; each class takes one more place
    than it has changes, whose rank is NO_RANK.

    Args:
        payload: as 64-bit integers, padded.
        predictions: a copy of FIRST_PREDICTIONS.
    """
    end = 8 * payload_bytes
    at, first = _take(payload, _NONE, end, _BYTE_BITS)
    if first < 0:
        return first
    at, present = _take(payload, at, end, _CLASSES)
    if present <= 0:
        return present if present < 0 else _COUNT
    start = 0
    words_left = words
    for number in range(CLASSES):
        starts[number] = start
        if present >> number & 1:
            at, count = _take_class(
                payload, at, end, predictions, words_left, words, ranks[start:], steps[start:], large
            )
            if count < 0:
                return count
            words_left -= count
            start += count
        ranks[start] = NO_RANK
        start += 1
    starts[CLASSES] = start
    filling = end - at
    if filling > 7:
        return _TRAILING
    at, bits = _take(payload, at, end, filling)
    return first if bits == 0 else _TRAILING
