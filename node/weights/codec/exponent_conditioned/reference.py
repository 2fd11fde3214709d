"""The exponent-conditioned codec in numpy: the reference for the C kernel, and the way without a compiler.

Read it next to proto/WEIGHTS.md. Encoding is vectorised; decoding reads one number after the other in Python,
about a microsecond each. That is enough to try a node on a small model.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from node.weights.codec.exponent_conditioned.bit_stream import BitReader, BitWriter, Numbers
from node.weights.codec.exponent_conditioned.payload_format import (
    CLASSES,
    COST_ONES,
    EXPONENT_MASK,
    EXPONENT_SHIFT,
    FIRST_LARGE,
    FIRST_POSITIONS,
    FIRST_SIZE_BITS,
    LARGEST_STEP,
    NUMBER_BITS,
    SAMPLE_BLOCK,
    SAMPLE_CHANGES,
    SAMPLE_WORDS,
    BrokenPayloadError,
    Delta,
    PayloadFault,
)
from node.weights.format.digests import Words, words_digest

name: Final = "numpy"


def encode(words: Words, *, base: Words, limit_bytes: int) -> Delta:
    """Return what makes ``words`` from ``base``."""
    changed = words != base
    payload = _payload(words, base=base, changed=changed) if changed.any() else b""
    return Delta(
        payload if len(payload) <= limit_bytes else None,
        changes=int(np.count_nonzero(changed)),
        digest=words_digest(words),
        is_finite=are_finite(words),
    )


def decode(payload: bytes, *, base: Words, out: Words) -> int:
    """Write the words to ``out`` and return their digest.

    Raises BrokenPayloadError: no encoder makes this payload; ``out`` is worthless.
    """
    bits = BitReader(payload)
    first = bits.take(8)
    present = bits.take(CLASSES)
    if present == 0:
        raise BrokenPayloadError(PayloadFault.COUNT)
    reader = _ClassReader(bits, words=out.size)
    changes = [(number, *reader.take()) for number in range(CLASSES) if present >> number & 1]
    bits.finish()
    classes = classes_of(base, first=first)
    np.copyto(out, base)
    for number, ranks, steps in changes:
        members = np.flatnonzero(classes == number)
        if ranks[-1] >= members.size:
            raise BrokenPayloadError(PayloadFault.POSITION)
        out[members[ranks]] += steps
    return words_digest(out)


def join(rest: bytes, exponents: bytes, *, out: Words) -> int:
    """Write the words made of a byte of sign and mantissa and of exponent; return their digest."""
    low = np.frombuffer(rest, np.uint8).astype(np.uint16)
    high = np.frombuffer(exponents, np.uint8).astype(np.uint16)
    np.bitwise_or((low & 0x80) << 8 | low & 0x7F, high << EXPONENT_SHIFT, out=out)
    return words_digest(out)


def are_finite(words: Words) -> bool:
    """Return whether no word, taken as bfloat16, is a NaN or an infinity."""
    # All exponent bits set: with the sign clear 0x7F80 or more, with the sign set 0xFF80 or more.
    return bool(words.view(np.int16).max() < 0x7F80 and words.max() < 0xFF80)


def _payload(words: Words, *, base: Words, changed: NDArray[np.bool_]) -> bytes:
    first = first_exponent(words, base=base)
    classes = classes_of(base, first=first)
    steps = (words - base).view(np.int16).astype(np.int64)
    bits = BitWriter()
    bits.put(first, 8)
    present = np.unique(classes[changed])
    bits.put(int(np.sum(1 << present)), CLASSES)
    writer = _ClassWriter(bits)
    for number in present:
        members = classes == number
        writer.put(np.flatnonzero(changed[members]), steps[members & changed])
    return bits.to_bytes()


def classes_of(base: Words, *, first: int) -> Numbers:
    """Return the class of each word: its exponent counted from ``first``, clamped."""
    return np.clip(_exponents(base) - first, 0, CLASSES - 1)


def first_exponent(words: Words, *, base: Words) -> int:
    """Return the exponent of class 0: the CLASSES exponents from it on have the most changes of a sample.

    Of several such, the highest: words with large exponents are many, and are better in separate classes.
    """
    stride = max(1, base.size // SAMPLE_WORDS)
    counts = _changes_by_exponent(words, base=base, stride=stride)
    if counts.sum() < SAMPLE_CHANGES:
        counts = _changes_by_exponent(words, base=base, stride=1)
    windows = np.convolve(counts, np.ones(CLASSES, np.int64), "valid")
    return windows.size - 1 - int(np.argmax(windows[::-1]))


def _changes_by_exponent(words: Words, *, base: Words, stride: int) -> Numbers:
    """Count the changes in the first of every ``stride`` blocks."""
    sampled = np.arange(base.size) // SAMPLE_BLOCK % stride == 0
    return np.bincount(_exponents(base[sampled & (words != base)]), minlength=EXPONENT_MASK + 1)


def _exponents(words: Words) -> Numbers:
    return (words >> EXPONENT_SHIFT & EXPONENT_MASK).astype(np.int64)


@dataclass(slots=True)
class _SubsetPrediction:
    """How the subset of the next class is coded, if it is like the last."""

    width: int
    """Binary digits of the number of members."""
    mode: int
    """Low bits of the gaps between members; if negative, -1 - the low bits of the runs of members."""


class _ClassWriter:
    def __init__(self, bits: BitWriter) -> None:
        self._bits = bits
        self._positions = _SubsetPrediction(*FIRST_POSITIONS)
        self._large = _SubsetPrediction(*FIRST_LARGE)
        self._size_bits = FIRST_SIZE_BITS

    def put(self, ranks: NDArray[np.intp], steps: Numbers) -> None:
        """Write the changes of a class: their ranks among its words, and their steps."""
        self._put_subset(ranks, self._positions)
        self._bits.put_flags(steps < 0)
        large = np.flatnonzero(np.abs(steps) > 1)
        self._put_subset(large, self._large)
        if large.size:
            numbers = np.abs(steps[large]) - 2
            size_bits = best_low_bits(numbers)
            # The same change is twice as many steps of a word whose exponent is one less.
            self._put_surprise(size_bits - (self._size_bits - 1))
            self._size_bits = size_bits
            self._bits.put_numbers(numbers, size_bits)

    def _put_subset(self, members: NDArray[np.intp], next_: _SubsetPrediction) -> None:
        width = members.size.bit_length()
        self._put_surprise(width - next_.width)
        next_.width = width
        if width == 0:
            return
        self._bits.put(members.size, width - 1)
        gaps = np.diff(members, prepend=-1) - 1
        if gaps.sum() >= members.size:
            numbers = gaps
            mode = low_bits = best_low_bits(numbers)
        else:
            numbers = _runs(members)
            low_bits = best_low_bits(numbers)
            mode = -1 - low_bits
        # With the next exponent half as many words change, so gaps double and runs halve.
        self._put_surprise(mode - (next_.mode + 1))
        next_.mode = mode
        self._bits.put_numbers(numbers, low_bits)

    def _put_surprise(self, surprise: int) -> None:
        zigzag = 2 * surprise if surprise >= 0 else -2 * surprise - 1
        self._bits.put_numbers(np.array([zigzag]), 0)


class _ClassReader:
    """Reads what ``_ClassWriter`` writes, and checks every field."""

    def __init__(self, bits: BitReader, *, words: int) -> None:
        self._bits = bits
        self._words = words
        self._words_left = words
        self._positions = _SubsetPrediction(*FIRST_POSITIONS)
        self._large = _SubsetPrediction(*FIRST_LARGE)
        self._size_bits = FIRST_SIZE_BITS

    def take(self) -> tuple[Numbers, Words]:
        """Read the changes of a class: their ranks among its words, and their steps modulo 2^16.

        Raises BrokenPayloadError: with the first fault, in the order of the fields.
        """
        ranks = self._take_subset(self._positions, most=self._words_left, end=self._words)
        if ranks.size == 0:
            raise BrokenPayloadError(PayloadFault.COUNT)
        self._words_left -= ranks.size
        signs = self._bits.take(ranks.size).to_bytes(-(-ranks.size // 8), "little")
        is_down = np.unpackbits(np.frombuffer(signs, np.uint8), count=ranks.size, bitorder="little")
        large = self._take_subset(self._large, most=ranks.size, end=ranks.size)
        sizes = np.ones(ranks.size, np.int64)
        if large.size:
            self._size_bits += self._take_surprise() - 1
            size_bits = _checked_low_bits(self._size_bits)
            for place in large:
                size = self._bits.take_number(size_bits) + 2
                # As in two's complement, the largest step goes down only.
                if size >= LARGEST_STEP + int(is_down[place]):
                    raise BrokenPayloadError(PayloadFault.SIZE)
                sizes[place] = size
        return ranks, np.where(is_down, -sizes, sizes).astype(np.uint16)

    def _take_subset(self, next_: _SubsetPrediction, *, most: int, end: int) -> Numbers:
        width = next_.width + self._take_surprise()
        next_.width = width
        if not 0 <= width <= NUMBER_BITS + 1:
            raise BrokenPayloadError(PayloadFault.PARAMETER)
        if width == 0:
            return np.empty(0, np.int64)
        count = 1 << width - 1 | self._bits.take(width - 1)
        if count > most:
            raise BrokenPayloadError(PayloadFault.COUNT)
        mode = next_.mode + 1 + self._take_surprise()
        next_.mode = mode
        low_bits = _checked_low_bits(mode if mode >= 0 else -1 - mode)
        return (self._take_gaps if mode >= 0 else self._take_runs)(count, low_bits, end)

    def _take_gaps(self, count: int, low_bits: int, end: int) -> Numbers:
        members = np.empty(count, np.int64)
        member = -1
        for place in range(count):
            member += 1 + self._bits.take_number(low_bits)
            if member >= end:
                raise BrokenPayloadError(PayloadFault.POSITION)
            members[place] = member
        return members

    def _take_runs(self, count: int, low_bits: int, end: int) -> Numbers:
        members = np.empty(count, np.int64)
        place = start = 0
        while place < count:
            run = self._bits.take_number(low_bits)
            # Each run ends with a word that is no member, so that empty runs end too.
            if run > count - place or start + run > end:
                raise BrokenPayloadError(PayloadFault.POSITION)
            members[place : place + run] = np.arange(start, start + run)
            place += run
            start += run + 1
        return members

    def _take_surprise(self) -> int:
        zigzag = self._bits.take_number(0)
        return zigzag >> 1 if zigzag & 1 == 0 else -(zigzag + 1 >> 1)


def best_low_bits(numbers: Numbers) -> int:
    """Return the low bits that code ``numbers`` shortest, or nearly: the first minimum below their mean."""
    low_bits = (int(numbers.sum()) // numbers.size).bit_length()
    cost = _cost(numbers, low_bits)
    while low_bits > 0 and (lower := _cost(numbers, low_bits - 1)) < cost:
        low_bits, cost = low_bits - 1, lower
    return low_bits


def _cost(numbers: Numbers, low_bits: int) -> int:
    return numbers.size * low_bits + int(np.minimum(numbers >> low_bits, COST_ONES).sum())


def _runs(members: NDArray[np.intp]) -> Numbers:
    """Return how many members come before each non-member that has a member after it, and after the last."""
    is_member = np.zeros(members[-1] + 1, np.bool_)
    is_member[members] = True
    fences = np.concatenate([[-1], np.flatnonzero(~is_member), [is_member.size]])
    return np.diff(fences) - 1


def _checked_low_bits(low_bits: int) -> int:
    if not 0 <= low_bits <= NUMBER_BITS:
        raise BrokenPayloadError(PayloadFault.PARAMETER)
    return low_bits
