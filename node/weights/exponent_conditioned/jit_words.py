"""The loops over words of jit.py: find the changes of a frame, apply them.

Words are counted by class eight at a time, as in node/weights/native/portable.h: a table gives a
unit in the nibble of a word's class, the nibbles of eight words are added to sixteen bytes, and
those to the counters of the frame before they run over.

Integers of 64 bits are kept apart by sign throughout: numba makes a float of a mixture.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from node.weights.exponent_conditioned.format import CLASSES, EXPONENT_MASK, EXPONENT_SHIFT, INFINITY_BITS

P = ParamSpec("P")
R = TypeVar("R")
Array = NDArray[Any]
Number = Any
"""An integer of numpy or of Python: numba has one kind of each width."""

_HALF = CLASSES // 2
_EXPONENT = np.uint64(EXPONENT_MASK)
_SHIFT_0, _SHIFT_1, _SHIFT_2, _SHIFT_3 = (np.uint64(EXPONENT_SHIFT + 16 * word) for word in range(4))
_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
_EXPONENT_BITS = np.uint16(INFINITY_BITS)
_HIGH_BITS = np.uint64(0x8080808080808080)
_ZERO, _FOUR, _BYTE, _NIBBLE = np.uint64(0), np.uint64(4), np.uint64(0xFF), np.uint64(0xF)
_FIND_GROUPS, _APPLY_GROUPS = 255 // 8, 127 // 8


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile at the first call; run without the interpreter lock.

    Nothing is kept on disk: numba would not notice that a number in format.py changed.
    """
    decorate: Any = numba.njit(nogil=True)
    dispatcher: Callable[P, R] = decorate(function)
    return dispatcher


def class_tables(first: int) -> tuple[Array, Array]:
    """Give the class of each exponent, and a unit in the nibble it is counted in."""
    classes = np.clip(np.arange(EXPONENT_MASK + 1) - first, 0, CLASSES - 1)
    shifts = 8 * (classes % _HALF) + np.where(classes < _HALF, 0, 4)
    return classes.astype(np.uint8), np.uint64(1) << shifts.astype(np.uint64)


def fours(words: Array) -> Array:
    """View words four at a time, as far as there are eight."""
    return words[: words.size & ~7].view(np.uint64)


@compiled
def are_finite(words: Array) -> bool:
    """Say whether no word, taken as bfloat16, has all exponent bits set."""
    # Compared in the words' own type, by index: so it becomes vector instructions, four times as fast.
    largest = np.uint16(0)
    for place in range(words.size):
        exponent = np.uint16(words[place] & _EXPONENT_BITS)
        largest = exponent if exponent > largest else largest
    return bool(largest < _EXPONENT_BITS)


@compiled
def _nibble_of(number: Number) -> np.uint64:
    return np.uint64(8 * (number % _HALF) + (0 if number < _HALF else 4))


@compiled
def _units(units: Array, four: np.uint64) -> np.uint64:
    total: np.uint64 = (
        units[four >> _SHIFT_0 & _EXPONENT]
        + units[four >> _SHIFT_1 & _EXPONENT]
        + units[four >> _SHIFT_2 & _EXPONENT]
        + units[four >> _SHIFT_3 & _EXPONENT]
    )
    return total


@compiled
def _empty_into(seen: Array, low: np.uint64, high: np.uint64) -> None:
    for number in range(_HALF):
        shift = np.uint64(8 * number)
        seen[number] += np.int64(low >> shift & _BYTE)
        seen[_HALF + number] += np.int64(high >> shift & _BYTE)


@compiled
def find(
    base: Array,
    words: Array,
    base_fours: Array,
    words_fours: Array,
    classes: Array,
    units: Array,
    found_class: Array,
    found_gap: Array,
    found_step: Array,
) -> int:
    """List the changes in the order of their places: class, unchanged words of it before, step."""
    seen = np.zeros(CLASSES, np.int64)
    after_last = np.zeros(CLASSES, np.int64)
    low = high = _ZERO
    groups = found = 0
    whole = base_fours.size * 4
    for group in range(base_fours.size // 2):
        left, right = base_fours[2 * group], base_fours[2 * group + 1]
        if left != words_fours[2 * group] or right != words_fours[2 * group + 1]:
            before = _ZERO
            for place in range(8 * group, 8 * group + 8):
                exponent = base[place] >> EXPONENT_SHIFT & EXPONENT_MASK
                if base[place] != words[place]:
                    number = np.int64(classes[exponent])
                    half = low if number < _HALF else high
                    rank = seen[number] + np.int64(half >> np.uint64(8 * (number % _HALF)) & _BYTE)
                    rank += np.int64(before >> _nibble_of(number) & _NIBBLE)
                    found_class[found] = number
                    found_gap[found] = rank - after_last[number]
                    found_step[found] = words[place] - base[place]
                    after_last[number] = rank + 1
                    found += 1
                before += units[exponent]
        nibbles = _units(units, left) + _units(units, right)
        low += nibbles & _NIBBLES
        high += nibbles >> _FOUR & _NIBBLES
        groups += 1
        if groups == _FIND_GROUPS:
            _empty_into(seen, low, high)
            low = high = _ZERO
            groups = 0
    _empty_into(seen, low, high)
    for place in range(whole, base.size):
        number = np.int64(classes[base[place] >> EXPONENT_SHIFT & EXPONENT_MASK])
        if base[place] != words[place]:
            found_class[found] = number
            found_gap[found] = seen[number] - after_last[number]
            found_step[found] = words[place] - base[place]
            after_last[number] = seen[number] + 1
            found += 1
        seen[number] += 1
    return found


@compiled
def _until(ranks: Array, cursors: Array, seen: Array, start: int) -> np.uint64:
    """Give how many words of eight classes, up to 127, may be counted before a change is passed."""
    until = _ZERO
    for number in range(_HALF):
        left = min(ranks[cursors[start + number]] - seen[start + number], 127)
        until |= np.uint64(left) << np.uint64(8 * number)
    return until


@compiled
def apply(
    base: Array,
    out: Array,
    base_fours: Array,
    out_fours: Array,
    classes: Array,
    units: Array,
    ranks: Array,
    steps: Array,
    starts: Array,
) -> bool:
    """Make the words; say whether every change found its word.

    Each class's ranks start at its ``starts`` and end with one that no word has.
    """
    seen = np.zeros(CLASSES, np.int64)
    cursors = starts[:CLASSES].copy()
    low = high = _ZERO
    low_until, high_until = _until(ranks, cursors, seen, 0), _until(ranks, cursors, seen, _HALF)
    groups = 0
    whole = base_fours.size * 4
    for group in range(base_fours.size // 2):
        left, right = base_fours[2 * group], base_fours[2 * group + 1]
        nibbles = _units(units, left) + _units(units, right)
        low_after = low + (nibbles & _NIBBLES)
        high_after = high + (nibbles >> _FOUR & _NIBBLES)
        room = ((low_until | _HIGH_BITS) - low_after) & ((high_until | _HIGH_BITS) - high_after)
        out_fours[2 * group] = left
        out_fours[2 * group + 1] = right
        groups += 1
        has_change = room & _HIGH_BITS != _HIGH_BITS
        if has_change:
            _empty_into(seen, low, high)
            _apply_each(base, out, 8 * group, 8 * group + 8, classes, ranks, steps, cursors, seen)
        elif groups < _APPLY_GROUPS:
            low, high = low_after, high_after
            continue
        else:
            _empty_into(seen, low_after, high_after)
        low = high = _ZERO
        low_until, high_until = _until(ranks, cursors, seen, 0), _until(ranks, cursors, seen, _HALF)
        groups = 0
    _empty_into(seen, low, high)
    _apply_each(base, out, whole, base.size, classes, ranks, steps, cursors, seen)
    return bool(np.all(cursors == starts[1:] - 1))


@compiled
def _apply_each(
    base: Array,
    out: Array,
    start: int,
    end: int,
    classes: Array,
    ranks: Array,
    steps: Array,
    cursors: Array,
    seen: Array,
) -> None:
    for place in range(start, end):
        number = np.int64(classes[base[place] >> EXPONENT_SHIFT & EXPONENT_MASK])
        out[place] = base[place]
        if seen[number] == ranks[cursors[number]]:
            out[place] = base[place] + steps[cursors[number]]
            cursors[number] += 1
        seen[number] += 1
