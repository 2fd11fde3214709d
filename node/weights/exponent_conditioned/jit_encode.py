"""The encoder's half of jit.py: changes -> bits. reference.py says what, this says it in loops.

What numba compiles holds no objects of ours: a bit stream is the 64-bit integers it fills, ``at``, how many
bits were written, and ``pending``, those of them that fill no integer yet.
"""

import numpy as np

from node.weights.exponent_conditioned.format import (
    CLASSES,
    COST_ONES,
    EXPONENT_MASK,
    EXPONENT_SHIFT,
    FIRST_LARGE,
    FIRST_POSITIONS,
    FIRST_SIZE_BITS,
    GROWS_AT,
    SAMPLE_BLOCK,
    SAMPLE_CHANGES,
    SAMPLE_WORDS,
)
from node.weights.exponent_conditioned.jit_words import Array, Number, compiled, part

# numba compiles a function anew for every number of Python it is called with, but not for those of numpy.
_NONE, _ALL, _BIT, _BYTE_BITS, _CLASSES = (np.int64(number) for number in (0, 1, 1, 8, CLASSES))
_POSITIONS, _LARGE, _SIZE_BITS = (np.int64(number) for number in (0, 2, 4))
"""Where the predictions are; a subset has two, width and mode."""

FIRST_PREDICTIONS = np.array([*FIRST_POSITIONS, *FIRST_LARGE, FIRST_SIZE_BITS])

_WORD_BITS, _NO_BITS = np.uint64(64), np.uint64(0)
_MOST_ONES = np.uint32(COST_ONES)


@compiled
def first_exponent(base: Array, words: Array, counts: Array) -> Number:
    """Give the exponent of class 0; ``counts`` is room for a number of each exponent."""
    changes = _sample(base, words, max(1, base.size // SAMPLE_WORDS), counts)
    if changes < SAMPLE_CHANGES:
        _sample(base, words, _ALL, counts)
    first = most = 0
    for start in range(EXPONENT_MASK + 2 - CLASSES):
        window: Number = 0
        for exponent in range(start, start + CLASSES):
            window += counts[exponent]
        if window >= most:
            first, most = start, window
    return first


@part
def _sample(base: Array, words: Array, stride: Number, counts: Array) -> Number:
    counts[:] = 0
    changes = 0
    for start in range(0, base.size, SAMPLE_BLOCK * stride):
        for place in range(start, min(start + SAMPLE_BLOCK, base.size)):
            if base[place] != words[place]:
                counts[base[place] >> EXPONENT_SHIFT & EXPONENT_MASK] += 1
                changes += 1
    return changes


@part
def _put(
    out: Array, at: Number, pending: np.uint64, value: Number, width: Number
) -> tuple[Number, np.uint64]:
    """Write up to 56 bits. What does not fit ``out`` spoils its last integer."""
    # Without branches that touch an array: numba would count a reference to it at each number.
    shift = np.uint64(at & 63)
    word = at >> 6
    pending |= np.uint64(value) << shift
    out[min(word, out.size - 1)] = pending
    at += width
    # Nothing is shifted by 64, which has no meaning: 56 bits from the first on do not fill 64.
    return at, pending if at >> 6 == word else np.uint64(value) >> (_WORD_BITS - shift)


@part
def _put_number(
    out: Array, at: Number, pending: np.uint64, number: Number, low_bits: Number
) -> tuple[Number, np.uint64]:
    ones = number >> low_bits
    low = number - (ones << low_bits)
    width = low_bits
    if ones >= GROWS_AT:
        growth = 0
        while (ones - (GROWS_AT - 1)) >> growth + 1:
            growth += 1
        low = number - ((GROWS_AT - 1 + (1 << growth)) << low_bits)
        ones = GROWS_AT + growth
        width = low_bits + growth
    return _put(out, at, pending, low << ones + 1 | (1 << ones) - 1, ones + 1 + width)


@part
def _put_surprise(out: Array, at: Number, pending: np.uint64, surprise: Number) -> tuple[Number, np.uint64]:
    zigzag = 2 * surprise if surprise >= 0 else -2 * surprise - 1
    return _put_number(out, at, pending, zigzag, _NONE)


@part
def _put_numbers(
    out: Array, at: Number, pending: np.uint64, numbers: Array, low_bits: Number
) -> tuple[Number, np.uint64]:
    for number in numbers:
        at, pending = _put_number(out, at, pending, np.int64(number), low_bits)
    return at, pending


@part
def _sum(numbers: Array) -> Number:
    total: Number = 0
    for number in numbers:
        total += np.int64(number)
    return total


@part
def _cost(numbers: Array, low_bits: Number) -> Number:
    ones = np.uint32(0)
    for place in range(numbers.size):
        more = np.uint32(numbers[place] >> np.uint32(low_bits))
        ones = np.uint32(ones + (more if more < _MOST_ONES else _MOST_ONES))
    return numbers.size * low_bits + np.int64(ones)


@part
def _best_low_bits(numbers: Array) -> Number:
    mean = _sum(numbers) // numbers.size
    low_bits = 0
    while mean >> low_bits:
        low_bits += 1
    cost = _cost(numbers, low_bits)
    while low_bits > 0:
        lower = _cost(numbers, low_bits - 1)
        if lower >= cost:
            break
        low_bits, cost = low_bits - 1, lower
    return low_bits


@part
def _list_runs(gaps: Array, runs: Array) -> Number:
    """Make the runs of the gaps; give how many."""
    run = made = 0
    for gap in gaps:
        for _ in range(gap):
            runs[made] = run
            made += 1
            run = 0
        run += 1
    runs[made] = run
    return made + 1


@part
def _put_subset(
    out: Array, at: Number, pending: np.uint64, predictions: Array, which: Number, gaps: Array, room: Array
) -> tuple[Number, np.uint64]:
    width = 0
    while gaps.size >> width:
        width += 1
    at, pending = _put_surprise(out, at, pending, width - predictions[which])
    predictions[which] = width
    if width == 0:
        return at, pending
    at, pending = _put(out, at, pending, gaps.size - (1 << width - 1), width - 1)
    is_sparse = _sum(gaps) >= gaps.size
    numbers = gaps if is_sparse else room[: _list_runs(gaps, room)]
    low_bits = _best_low_bits(numbers)
    mode = low_bits if is_sparse else -1 - low_bits
    at, pending = _put_surprise(out, at, pending, mode - (predictions[which + 1] + 1))
    predictions[which + 1] = mode
    return _put_numbers(out, at, pending, numbers, low_bits)


@part
def _put_class(
    out: Array,
    at: Number,
    pending: np.uint64,
    predictions: Array,
    gaps: Array,
    steps: Array,
    sizes: Array,
    room: Array,
) -> tuple[Number, np.uint64]:
    at, pending = _put_subset(out, at, pending, predictions, _POSITIONS, gaps, room)
    large: Number = 0
    small = 0
    for step in steps:
        is_down = np.int64(step) >> 15
        at, pending = _put(out, at, pending, is_down, _BIT)
        size = 0x10000 - np.int64(step) if is_down else np.int64(step)
        # Written over by the next one unless it is large: no branch that nobody could predict.
        gaps[large] = small
        sizes[large] = size - 2
        is_large = size > 1
        large += is_large
        small = 0 if is_large else small + 1
    at, pending = _put_subset(out, at, pending, predictions, _LARGE, gaps[:large], room)
    if large == 0:
        return at, pending
    size_bits = _best_low_bits(sizes[:large])
    at, pending = _put_surprise(out, at, pending, size_bits - (predictions[_SIZE_BITS] - 1))
    predictions[_SIZE_BITS] = size_bits
    return _put_numbers(out, at, pending, sizes[:large], size_bits)


@compiled
def write(
    first: Number,
    found_class: Array,
    found_gap: Array,
    found_step: Array,
    starts: Array,
    predictions: Array,
    gaps: Array,
    steps: Array,
    sizes: Array,
    room: Array,
    out: Array,
) -> Number:
    """Write the payload of the changes found; give its size in bytes, which may be more than fits ``out``.

    Args:
        starts: CLASSES + 1 zeros.
        predictions: a copy of FIRST_PREDICTIONS.
        gaps, steps, sizes, room: as many as there are changes.
    """
    for number in found_class:
        starts[number + 1] += 1
    present = _NONE
    for number in range(CLASSES):
        present |= np.int64(starts[number + 1] > 0) << number
        starts[number + 1] += starts[number]
    for change in range(found_class.size):
        number = found_class[change]
        gaps[starts[number]] = found_gap[change]
        steps[starts[number]] = found_step[change]
        starts[number] += 1
    at, pending = _put(out, _NONE, _NO_BITS, first, _BYTE_BITS)
    at, pending = _put(out, at, pending, present, _CLASSES)
    start = _NONE
    for number in range(CLASSES):
        # Each class starts where the next one did: its changes have been put there.
        end = starts[number]
        if start < end:
            at, pending = _put_class(
                out, at, pending, predictions, gaps[start:end], steps[start:end], sizes, room
            )
        start = end
    out[min(at >> 6, out.size - 1)] = pending
    return at + 7 >> 3
