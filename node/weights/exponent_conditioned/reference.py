"""The exponent-conditioned codec in numpy: the definition that the fast implementations must meet.

Written to be read next to proto/WEIGHTS.md. Encoding is vectorised; decoding reads number after
number in Python, at about a microsecond each, which a node without a compiler can live with.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from node.weights.digests import Words
from node.weights.exponent_conditioned.format import (
    CLASSES,
    EXPONENT_MASK,
    EXPONENT_SHIFT,
    FIRST_LARGE_MODE,
    FIRST_LARGE_WIDTH,
    FIRST_POSITION_MODE,
    FIRST_POSITION_WIDTH,
    FIRST_SIZE_BITS,
    GROWS_AT,
    LARGEST_SIZE,
    NUMBER_BITS,
    ONES_MOST,
    SAMPLE_BLOCK,
    SAMPLE_CHANGES,
    SAMPLE_WORDS,
    UNREAD,
    WORDS_MOST,
    Fault,
)

NAME: Final = "numpy"

Numbers = NDArray[np.int64]


def encode(words: Words, *, base: Words, limit_bytes: int) -> bytes | None:
    """Give the payload that turns ``base`` into ``words``; None if it is longer than ``limit_bytes``.

    The two must differ somewhere.
    """
    first = first_exponent(words, base=base)
    classes = classes_of(base, first=first)
    changed = words != base
    step = (words - base).view(np.int16).astype(np.int64)
    present = np.unique(classes[changed])
    bits = _BitWriter()
    bits.put(first, 8)
    bits.put(int(np.bitwise_or.reduce(1 << present)), CLASSES)
    writer = _ClassWriter(bits)
    for number in present:
        members = classes == number
        writer.put(np.flatnonzero(changed[members]), step[members & changed])
    payload = bits.to_bytes()
    return payload if len(payload) <= limit_bytes else None


def decode(payload: bytes, *, base: Words, out: Words) -> Fault:
    """Write what ``payload`` makes of ``base`` to ``out``; if the answer is a fault, ``out`` is worthless."""
    bits = _BitReader(payload)
    try:
        first = bits.take(8)
        present = bits.take(CLASSES)
        if present == 0:
            raise _BrokenError(Fault.COUNT)
        reader = _ClassReader(bits, words=out.size)
        changes = [(number, *reader.take()) for number in range(CLASSES) if present >> number & 1]
        bits.finish()
    except _BrokenError as broken:
        return broken.fault
    classes = classes_of(base, first=first)
    np.copyto(out, base)
    for number, ranks, step in changes:
        members = np.flatnonzero(classes == number)
        if ranks[-1] >= members.size:
            return Fault.POSITION
        out[members[ranks]] += step
    return Fault.NONE


def first_exponent(words: Words, *, base: Words) -> int:
    """Give the exponent of class 0: the 16 exponents from it have the most changes in a sample.

    Of windows with equally many, the highest: large words are the most, so they deserve the classes.
    """
    stride = max(1, base.size // SAMPLE_WORDS)
    counts = _change_counts(words, base=base, stride=stride)
    if stride > 1 and counts.sum() < SAMPLE_CHANGES:
        counts = _change_counts(words, base=base, stride=1)
    windows = np.convolve(counts, np.ones(CLASSES, np.int64), "valid")
    return windows.size - 1 - int(np.argmax(windows[::-1]))


def classes_of(base: Words, *, first: int) -> NDArray[np.int64]:
    """Give each word's class: its exponent, counted from ``first`` and clamped."""
    exponents = (base >> EXPONENT_SHIFT & EXPONENT_MASK).astype(np.int64)
    return np.clip(exponents - first, 0, CLASSES - 1)


def _change_counts(words: Words, *, base: Words, stride: int) -> Numbers:
    starts = np.arange(0, base.size, SAMPLE_BLOCK * stride)
    sample = (starts[:, None] + np.arange(SAMPLE_BLOCK)).ravel()
    sample = sample[sample < base.size]
    sample = sample[words[sample] != base[sample]]
    return np.bincount(base[sample] >> EXPONENT_SHIFT & EXPONENT_MASK, minlength=EXPONENT_MASK + 1)


class _BitWriter:
    """Bits from the lowest of the first byte on."""

    def __init__(self) -> None:
        self._values: list[Numbers] = []
        self._widths: list[Numbers] = []

    def put(self, value: int, width: int) -> None:
        self.put_all(np.array([value]), np.array([width]))

    def put_all(self, values: Numbers, widths: Numbers) -> None:
        self._values.append(values)
        self._widths.append(widths)

    def put_numbers(self, numbers: Numbers, low_bits: int) -> None:
        """Code numbers: ones, a zero, low bits. From GROWS_AT ones on, every further one adds a low bit."""
        ones = numbers >> low_bits
        growth = np.maximum(np.frexp(np.maximum(ones - (GROWS_AT - 1), 1))[1] - 1, 0).astype(np.int64)
        ones = np.where(ones < GROWS_AT, ones, GROWS_AT + growth)
        low = numbers & (1 << (low_bits + growth)) - 1
        # At GROWS_AT + g ones the numbers start at (GROWS_AT - 1 + 2^g) << low_bits.
        grown = numbers - ((GROWS_AT - 1 + (1 << growth)) << low_bits)
        low = np.where(ones < GROWS_AT, low, grown)
        self.put_all((1 << ones) - 1 | low << (ones + 1), ones + 1 + low_bits + growth)

    def to_bytes(self) -> bytes:
        values, widths = np.concatenate(self._values), np.concatenate(self._widths)
        starts = np.repeat(np.cumsum(widths) - widths, widths)
        offsets = np.arange(starts.size) - starts
        bits = np.repeat(values, widths) >> offsets & 1
        return np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()


class _ClassWriter:
    """Writes class after class; each field is predicted from the class before."""

    def __init__(self, bits: _BitWriter) -> None:
        self._bits = bits
        self._positions = _Prediction(FIRST_POSITION_WIDTH, FIRST_POSITION_MODE)
        self._large = _Prediction(FIRST_LARGE_WIDTH, FIRST_LARGE_MODE)
        self._size_bits = FIRST_SIZE_BITS

    def put(self, ranks: NDArray[np.intp], step: Numbers) -> None:
        bits = self._bits
        self._put_subset(ranks, self._positions)
        bits.put_all((step < 0).astype(np.int64), np.ones(step.size, np.int64))
        sizes = np.abs(step)
        large = np.flatnonzero(sizes > 1)
        self._put_subset(large, self._large)
        if large.size:
            numbers = sizes[large] - 2
            low_bits = best_low_bits(numbers)
            self._put_parameter(low_bits - (self._size_bits - 1))
            bits.put_numbers(numbers, low_bits)
            self._size_bits = low_bits

    def _put_subset(self, members: NDArray[np.intp], prediction: "_Prediction") -> None:
        width = members.size.bit_length()
        self._put_parameter(width - prediction.width)
        if width > 1:
            self._bits.put(members.size & (1 << width - 1) - 1, width - 1)
        prediction.width = width
        if width == 0:
            return
        gaps = np.diff(members, prepend=-1) - 1
        if gaps.sum() < members.size:
            others = np.repeat(np.cumsum(gaps > 0), gaps)
            numbers = _runs(gaps)
            del others
            low_bits = best_low_bits(numbers)
            mode = -1 - low_bits
        else:
            numbers = gaps
            low_bits = mode = best_low_bits(numbers)
        self._put_parameter(mode - (prediction.mode + 1))
        self._bits.put_numbers(numbers, low_bits)
        prediction.mode = mode

    def _put_parameter(self, surprise: int) -> None:
        zigzag = 2 * surprise if surprise >= 0 else -2 * surprise - 1
        self._bits.put_numbers(np.array([zigzag]), 0)


@dataclass(slots=True)
class _Prediction:
    """How the next class will be coded, if it is like the last."""

    width: int
    mode: int


def _runs(gaps: Numbers) -> Numbers:
    """Give the members before each non-member, then those after the last one that matters."""
    ranks = np.cumsum(gaps + 1) - 1
    absent = np.setdiff1d(np.arange(ranks[-1]), ranks)
    return np.diff(np.concatenate([[-1], absent, [ranks[-1] + 1]])) - 1


def best_low_bits(numbers: Numbers) -> int:
    """Give how many low bits code ``numbers`` shortest, found downwards from the logarithm of their mean."""
    low_bits = int(int(numbers.sum()) // numbers.size).bit_length()
    cost = _cost(numbers, low_bits)
    while low_bits > 0 and (lower := _cost(numbers, low_bits - 1)) < cost:
        low_bits, cost = low_bits - 1, lower
    return low_bits


def _cost(numbers: Numbers, low_bits: int) -> int:
    return numbers.size * low_bits + int(np.minimum(numbers >> low_bits, UNREAD).sum())


class _BrokenError(Exception):
    def __init__(self, fault: Fault) -> None:
        self.fault = fault


class _BitReader:
    """Reads what ``_BitWriter`` wrote; past the end it reads zeros, and says so after each field."""

    def __init__(self, payload: bytes) -> None:
        self._bits = int.from_bytes(payload, "little")
        self._payload = payload
        self._end = 8 * len(payload)
        self._at = 0
