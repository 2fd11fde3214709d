"""The encoder's half of jit.py: changes -> bits. reference.py says what, this says it in loops.

What numba compiles holds no objects of ours: a bit stream is its bytes and a ``state`` of three numbers.
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
from node.weights.exponent_conditioned.jit_words import Array, Number, compiled

_SIZE, _PENDING, _PENDING_BITS = 0, 1, 2
_BYTE, _EIGHT = np.uint64(0xFF), np.uint64(8)

_POSITIONS_WIDTH, _POSITIONS_MODE, _LARGE_WIDTH, _LARGE_MODE, _SIZE_BITS = 0, 1, 2, 3, 4
_FIRST_PREDICTIONS = np.array([*FIRST_POSITIONS, *FIRST_LARGE, FIRST_SIZE_BITS])


@compiled
def _sample(base: Array, words: Array, stride: Number) -> Array:
    counts = np.zeros(EXPONENT_MASK + 1, np.int64)
    for start in range(0, base.size, SAMPLE_BLOCK * stride):
        for place in range(start, min(start + SAMPLE_BLOCK, base.size)):
            if base[place] != words[place]:
                counts[base[place] >> EXPONENT_SHIFT & EXPONENT_MASK] += 1
    return counts


@compiled
def first_exponent(base: Array, words: Array) -> Number:
    """Give the exponent of class 0."""
    counts = _sample(base, words, max(1, base.size // SAMPLE_WORDS))
    if counts.sum() < SAMPLE_CHANGES:
        counts = _sample(base, words, 1)
    first, most = 0, 0
    for start in range(EXPONENT_MASK + 2 - CLASSES):
        window = counts[start : start + CLASSES].sum()
        if window >= most:
            first, most = start, window
    return first


@compiled
def _put(out: Array, state: Array, value: Number, width: Number) -> None:
    """Write up to 56 bits. What does not fit ``out`` is only counted."""
    pending = state[_PENDING] | np.uint64(value) << state[_PENDING_BITS]
    bits = np.int64(state[_PENDING_BITS]) + width
    size = np.int64(state[_SIZE])
    while bits >= 8:
        if size < out.size:
            out[size] = pending & _BYTE
        size += 1
        pending >>= _EIGHT
        bits -= 8
    state[_SIZE], state[_PENDING], state[_PENDING_BITS] = np.uint64(size), pending, np.uint64(bits)


@compiled
def _put_number(out: Array, state: Array, number: Number, low_bits: Number) -> None:
    ones = number >> low_bits
    if ones < GROWS_AT:
        _put(out, state, (number - (ones << low_bits)) << ones + 1 | (1 << ones) - 1, ones + 1 + low_bits)
        return
    growth = 0
    while (ones - (GROWS_AT - 1)) >> growth + 1:
        growth += 1
    ones = GROWS_AT + growth
    low = number - ((GROWS_AT - 1 + (1 << growth)) << low_bits)
    _put(out, state, low << ones + 1 | (1 << ones) - 1, ones + 1 + low_bits + growth)


@compiled
def _put_surprise(out: Array, state: Array, surprise: Number) -> None:
    _put_number(out, state, 2 * surprise if surprise >= 0 else -2 * surprise - 1, 0)


@compiled
def _cost(numbers: Array, low_bits: Number) -> Number:
    cost = numbers.size * low_bits
    for number in numbers:
        ones = np.int64(number) >> low_bits
        cost += ones if ones < COST_ONES else COST_ONES
    return cost


@compiled
def _best_low_bits(numbers: Array) -> Number:
    mean = np.int64(numbers.sum()) // numbers.size
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


@compiled
def _runs(gaps: Array, room: Array) -> Array:
    run = made = 0
    for gap in gaps:
        for _ in range(gap):
            room[made] = run
            made += 1
            run = 0
        run += 1
    room[made] = run
    return room[: made + 1]


@compiled
def _put_subset(
    out: Array, state: Array, predictions: Array, width_at: Number, gaps: Array, room: Array
) -> None:
    width = 0
    while gaps.size >> width:
        width += 1
    _put_surprise(out, state, width - predictions[width_at])
    predictions[width_at] = width
    if width == 0:
        return
    _put(out, state, gaps.size - (1 << width - 1), width - 1)
    if np.int64(gaps.sum()) >= gaps.size:
        numbers = gaps
        low_bits = _best_low_bits(numbers)
        mode = low_bits
    else:
        numbers = _runs(gaps, room)
        low_bits = _best_low_bits(numbers)
        mode = -1 - low_bits
    _put_surprise(out, state, mode - (predictions[width_at + 1] + 1))
    predictions[width_at + 1] = mode
    for number in numbers:
        _put_number(out, state, np.int64(number), low_bits)


@compiled
def _put_class(out: Array, state: Array, predictions: Array, gaps: Array, steps: Array, room: Array) -> None:
    _put_subset(out, state, predictions, _POSITIONS_WIDTH, gaps, room)
    for step in steps:
        _put(out, state, np.int64(step) >> 15, 1)
    large = small = 0
    sizes = np.empty(steps.size, np.uint32)
    for step in steps:
        size = np.int64(step) if step < 0x8000 else 0x10000 - np.int64(step)
        if size > 1:
            gaps[large] = small
            sizes[large] = size - 2
            large += 1
            small = 0
        else:
            small += 1
    _put_subset(out, state, predictions, _LARGE_WIDTH, gaps[:large], room)
    if large == 0:
        return
    size_bits = _best_low_bits(sizes[:large])
    _put_surprise(out, state, size_bits - (predictions[_SIZE_BITS] - 1))
    predictions[_SIZE_BITS] = size_bits
    for size in sizes[:large]:
        _put_number(out, state, np.int64(size), size_bits)


@compiled
def write(first: Number, found_class: Array, found_gap: Array, found_step: Array, out: Array) -> Number:
    """Write the payload of the changes found; give its size, which may be more than fits ``out``."""
    starts = np.zeros(CLASSES + 1, np.int64)
    for number in found_class:
        starts[number + 1] += 1
    present: Number = 0
    for number in range(CLASSES):
        present |= np.int64(starts[number + 1] > 0) << number
        starts[number + 1] += starts[number]
    places = starts.copy()
    gaps = np.empty(found_gap.size, np.uint32)
    steps = np.empty(found_gap.size, np.uint16)
    for change in range(found_gap.size):
        place = places[found_class[change]]
        places[found_class[change]] += 1
        gaps[place] = found_gap[change]
        steps[place] = found_step[change]
    state = np.zeros(3, np.uint64)
    _put(out, state, first, 8)
    _put(out, state, present, CLASSES)
    predictions = _FIRST_PREDICTIONS.copy()
    room = np.empty(found_gap.size, np.uint32)
    for number in range(CLASSES):
        start, end = starts[number], starts[number + 1]
        if start < end:
            _put_class(out, state, predictions, gaps[start:end], steps[start:end], room)
    if state[_PENDING_BITS] > 0:
        _put(out, state, 0, 8 - np.int64(state[_PENDING_BITS]))
    return np.int64(state[_SIZE])
