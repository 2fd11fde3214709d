"""The decoder's half of jit.py: bits -> changes. Every number is checked before it is used.

What numba compiles raises nothing of ours: a function gives what it read, or a fault as a negative number.
``at`` is where a bit stream is read and where it ends, in bits.
"""

import numpy as np

from node.weights.exponent_conditioned.format import (
    CLASSES,
    FIRST_LARGE,
    FIRST_POSITIONS,
    FIRST_SIZE_BITS,
    GROWS_AT,
    LARGEST_STEP,
    NUMBER_BITS,
    Fault,
)
from node.weights.exponent_conditioned.jit_words import Array, Number, compiled

PADDING_BYTES = 8
"""Zeros that must follow a payload, so that eight bytes can be read anywhere."""

NO_RANK = np.iinfo(np.int32).max
"""Ends the ranks of a class."""

_TRUNCATED, _TRAILING, _NUMBER, _PARAMETER, _COUNT, _POSITION, _SIZE = (
    -int(fault) for fault in Fault if fault is not Fault.NONE
)
_POSITIONS_WIDTH, _LARGE_WIDTH, _SIZE_BITS = 0, 2, 4
_FIRST_PREDICTIONS = np.array([*FIRST_POSITIONS, *FIRST_LARGE, FIRST_SIZE_BITS])
_ONE = np.uint64(1)


@compiled
def _peek(payload: Array, place: Number) -> np.uint64:
    """Give the next 57 bits or more."""
    byte = place >> 3
    window = np.uint64(0)
    for following in range(8):
        window |= np.uint64(payload[byte + following]) << np.uint64(8 * following)
    return window >> np.uint64(place & 7)


@compiled
def _take(payload: Array, at: Array, width: Number) -> Number:
    """Read up to 56 bits."""
    value = np.int64(_peek(payload, at[0]) & (_ONE << np.uint64(width)) - _ONE)
    at[0] += width
    return value if at[0] <= at[1] else _TRUNCATED


@compiled
def _take_number(payload: Array, at: Array, low_bits: Number) -> Number:
    window = _peek(payload, at[0])
    ones = 0
    while window >> np.uint64(ones) & _ONE and ones <= GROWS_AT + NUMBER_BITS:
        ones += 1
    growth = max(0, ones - GROWS_AT)
    if low_bits + growth > NUMBER_BITS:
        return _NUMBER
    start = ones if growth == 0 else GROWS_AT - 1 + (1 << growth)
    width = low_bits + growth
    low = np.int64(window >> np.uint64(ones + 1) & (_ONE << np.uint64(width)) - _ONE)
    at[0] += ones + 1 + width
    return (start << low_bits) + low if at[0] <= at[1] else _TRUNCATED


@compiled
def _change_by_surprise(payload: Array, at: Array, predictions: Array, which: Number) -> Number:
    zigzag = _take_number(payload, at, 0)
    if zigzag < 0:
        return zigzag
    predictions[which] += zigzag >> 1 if zigzag & 1 == 0 else -(zigzag + 1 >> 1)
    return 0


@compiled
def _take_gaps(payload: Array, at: Array, low_bits: Number, end: Number, members: Array) -> Number:
    member = -1
    for place in range(members.size):
        gap = _take_number(payload, at, low_bits)
        if gap < 0:
            return gap
        member += 1 + gap
        if member >= end:
            return _POSITION
        members[place] = member
    return members.size


@compiled
def _take_runs(payload: Array, at: Array, low_bits: Number, end: Number, members: Array) -> Number:
    place = start = 0
    while place < members.size:
        run = _take_number(payload, at, low_bits)
        if run < 0:
            return run
        # Each run ends with a word that is no member, so that empty runs come to an end too.
        if run > members.size - place or start + run > end:
            return _POSITION
        for member in range(start, start + run):
            members[place] = member
            place += 1
        start += run + 1
    return members.size


@compiled
def _take_subset(
    payload: Array, at: Array, predictions: Array, which: Number, most: Number, end: Number, members: Array
) -> Number:
    """Read up to ``most`` ascending members below ``end``; give how many."""
    fault = _change_by_surprise(payload, at, predictions, which)
    if fault < 0:
        return fault
    width = predictions[which]
    if not 0 <= width <= NUMBER_BITS + 1:
        return _PARAMETER
    if width == 0:
        return 0
    low = _take(payload, at, width - 1)
    if low < 0:
        return low
    count = 1 << width - 1 | low
    if count > most:
        return _COUNT
    predictions[which + 1] += 1
    fault = _change_by_surprise(payload, at, predictions, which + 1)
    if fault < 0:
        return fault
    mode = predictions[which + 1]
    low_bits = mode if mode >= 0 else -1 - mode
    if low_bits > NUMBER_BITS:
        return _PARAMETER
    if mode >= 0:
        return _take_gaps(payload, at, low_bits, end, members[:count])
    return _take_runs(payload, at, low_bits, end, members[:count])


@compiled
def _take_class(
    payload: Array,
    at: Array,
    predictions: Array,
    words_left: Number,
    words: Number,
    ranks: Array,
    steps: Array,
    large: Array,
) -> Number:
    """Read the changes of one class; give how many."""
    count = _take_subset(payload, at, predictions, _POSITIONS_WIDTH, words_left, words, ranks)
    if count <= 0:
        return count if count < 0 else _COUNT
    for change in range(count):
        sign = _take(payload, at, 1)
        if sign < 0:
            return sign
        steps[change] = 1 - 2 * sign
    large_count = _take_subset(payload, at, predictions, _LARGE_WIDTH, count, count, large)
    if large_count <= 0:
        return large_count if large_count < 0 else count
    predictions[_SIZE_BITS] -= 1
    fault = _change_by_surprise(payload, at, predictions, _SIZE_BITS)
    if fault < 0:
        return fault
    if not 0 <= predictions[_SIZE_BITS] <= NUMBER_BITS:
        return _PARAMETER
    for change in large[:large_count]:
        number = _take_number(payload, at, predictions[_SIZE_BITS])
        if number < 0:
            return number
        # As in two's complement, the largest step goes down only.
        is_down = steps[change] != 1
        if number + 2 >= LARGEST_STEP + is_down:
            return _SIZE
        steps[change] = -(number + 2) if is_down else number + 2
    return count


@compiled
def read(
    padded: Array,
    payload_bytes: Number,
    words: Number,
    ranks: Array,
    steps: Array,
    large: Array,
    starts: Array,
) -> Number:
    """Read all changes; give the exponent of class 0.

    ``starts[c]`` is where class c begins in ``ranks`` and ``steps``; each class takes one more place
    than it has changes, whose rank is NO_RANK.
    """
    at = np.array([0, 8 * payload_bytes])
    first = _take(padded, at, 8)
    if first < 0:
        return first
    present = _take(padded, at, CLASSES)
    if present <= 0:
        return present if present < 0 else _COUNT
    predictions = _FIRST_PREDICTIONS.copy()
    start = 0
    words_left = words
    for number in range(CLASSES):
        starts[number] = start
        if present >> number & 1:
            count = _take_class(
                padded, at, predictions, words_left, words, ranks[start:], steps[start:], large
            )
            if count < 0:
                return count
            words_left -= count
            start += count
        ranks[start] = NO_RANK
        start += 1
    starts[CLASSES] = start
    if at[1] - at[0] > 7 or _take(padded, at, at[1] - at[0]) != 0:
        return _TRAILING
    return first
