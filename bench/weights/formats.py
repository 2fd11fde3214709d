"""The formats others send weight deltas in, in numpy, for ``bench.weights`` to compare with.

What each is was read from public sources (mid-2026); each is given its best case: changes are found
four words at a time, nothing is serialised through tensors or files.

    pulse      per tensor, row deltas u8 and column deltas u16 of 2-D places, new values; JSON header; all of
               it in one zstd-1 frame (PULSE v3.1). A flat tensor is taken in rows of 1024
    gap_xor    u16 gaps and u16 XORs over the flat array, in one zstd-1 frame (NeMo-RL)
    leb128     LEB128 gaps and new values (SparrowRL)
    dense_xor  the XOR of all words in one zstd-1 frame, xxh3 per tensor (slime)
    raw        u32 places and new values (TRL)
"""

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from node.weights.format.digests import Words

Places = NDArray[np.int64]
Array = NDArray[Any]

_GAP_MOST: Final = 0xFFFF
_FLAT_COLUMNS: Final = 1024


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the model, where it lies in the flat array, and its shape for those who use it."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def words(self) -> int:
        return math.prod(self.shape)

    @property
    def slice(self) -> slice:
        return slice(self.start, self.start + self.words)


class Format(Protocol):
    """One whole delta as bytes."""

    @property
    def name(self) -> str:
        """As it is printed."""

    def encode(self, words: Words, *, base: Words, tensors: Sequence[Tensor]) -> bytes:
        """Code what makes ``words`` of ``base``."""

    def apply(self, payload: bytes, *, out: Words, tensors: Sequence[Tensor]) -> None:
        """Change ``out``, which holds the base, into the new words."""


def changed_places(words: Words, base: Words) -> Places:
    """Return the places that differ, in order."""
    wide = words.size & ~3
    hits = np.flatnonzero(words[:wide].view(np.uint64) != base[:wide].view(np.uint64))
    near = np.concatenate([(4 * hits[:, None] + np.arange(4)).ravel(), np.arange(wide, words.size)])
    places: Places = near[words[near] != base[near]]
    return places


def _columns(shape: Sequence[int]) -> int:
    return math.prod(shape[1:]) if len(shape) > 1 else _FLAT_COLUMNS


def _compress(*parts: Array | bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(
        b"".join(part if isinstance(part, bytes) else part.tobytes() for part in parts)
    )


class Pulse:
    """PULSE v3.1."""

    name = "pulse"

    def encode(self, words: Words, *, base: Words, tensors: Sequence[Tensor]) -> bytes:
        """Code tensor by tensor."""
        header, parts, offset = [], [], 0
        for tensor in tensors:
            new = words[tensor.slice]
            places = changed_places(new, base[tensor.slice])
            if places.size == 0:
                continue
            row, column = np.divmod(places, _columns(tensor.shape))
            row_step = np.diff(row, prepend=0)
            column_step = np.where(row_step != 0, column, np.diff(column, prepend=0))
            column_step[0] = column[0]
            rows = row_step.astype(_narrowest(row_step, (np.uint8, np.uint16, np.int32)))
            columns = column_step.astype(_narrowest(column_step, (np.uint16, np.int32)))
            values = new[places]
            header.append(
                {
                    "name": tensor.name,
                    "shape": tensor.shape,
                    "num_nonzero": places.size,
                    "value_dtype": "bfloat16",
                    "row_dtype": rows.dtype.name,
                    "col_dtype": columns.dtype.name,
                    "indices_offset": offset,
                    "indices_size": rows.nbytes + columns.nbytes,
                    "rows_size": rows.nbytes,
                    "cols_size": columns.nbytes,
                    "values_offset": offset + rows.nbytes + columns.nbytes,
                    "values_size": values.nbytes,
                }
            )
            offset += rows.nbytes + columns.nbytes + values.nbytes
            parts += [rows, columns, values]
        text = json.dumps({"version": 31, "tensors": header}, separators=(",", ":")).encode()
        return _compress(struct.pack("<I", len(text)), text, *parts)

    def apply(self, payload: bytes, *, out: Words, tensors: Sequence[Tensor]) -> None:
        """Apply tensor by tensor."""
        plain = zstandard.ZstdDecompressor().decompress(payload)
        (size,) = struct.unpack_from("<I", plain)
        body = 4 + size
        starts = {tensor.name: tensor.start for tensor in tensors}
        for entry in json.loads(plain[4:body])["tensors"]:
            count, at = entry["num_nonzero"], body + entry["indices_offset"]
            row_step = np.frombuffer(plain, entry["row_dtype"], count, at)
            column_step = np.frombuffer(plain, entry["col_dtype"], count, at + entry["rows_size"])
            values = np.frombuffer(plain, np.uint16, count, body + entry["values_offset"])
            # Columns start anew with each row: subtract what had been added up before it.
            column = np.cumsum(column_step, dtype=np.int64)
            is_first = row_step != 0
            is_first[0] = True
            firsts = np.flatnonzero(is_first)
            before = column[firsts] - column_step[firsts]
            column -= np.repeat(before, np.diff(firsts, append=count))
            places = np.cumsum(row_step, dtype=np.int64) * _columns(entry["shape"]) + column
            out[starts[entry["name"]] + places] = values


class GapXor:
    """NeMo-RL. A gap that does not fit is split by changes of nothing."""

    name = "gap_xor"

    def encode(self, words: Words, *, base: Words, tensors: Sequence[Tensor]) -> bytes:
        """Code the flat array."""
        places = changed_places(words, base)
        gaps = np.diff(places, prepend=-1) - 1
        fillers = gaps // (_GAP_MOST + 1)
        ends = np.cumsum(fillers + 1) - 1
        short = np.full(places.size + fillers.sum(), _GAP_MOST, np.uint16)
        short[ends] = gaps - fillers * (_GAP_MOST + 1)
        flips = np.zeros(short.size, np.uint16)
        flips[ends] = words[places] ^ base[places]
        return _compress(short, flips)

    def apply(self, payload: bytes, *, out: Words, tensors: Sequence[Tensor]) -> None:
        """Flip bits."""
        plain = np.frombuffer(zstandard.ZstdDecompressor().decompress(payload), np.uint16)
        gaps, flips = plain[: plain.size // 2], plain[plain.size // 2 :]
        out[np.cumsum(gaps.astype(np.int64) + 1) - 1] ^= flips


class Leb128:
    """SparrowRL."""

    name = "leb128"

    def encode(self, words: Words, *, base: Words, tensors: Sequence[Tensor]) -> bytes:
        """Code the flat array."""
        places = changed_places(words, base)
        gaps = np.diff(places, prepend=-1) - 1
        groups = np.stack([gaps >> shift & 0x7F for shift in range(0, 35, 7)], axis=1)
        lengths = 1 + sum((gaps >> shift != 0).astype(np.int64) for shift in range(7, 35, 7))
        index = np.arange(5)
        groups |= np.where(index < lengths[:, None] - 1, 0x80, 0)
        offsets = groups.astype(np.uint8)[index < lengths[:, None]]
        return b"".join((struct.pack("<I", places.size), offsets.tobytes(), words[places].tobytes()))

    def apply(self, payload: bytes, *, out: Words, tensors: Sequence[Tensor]) -> None:
        """Write values."""
        (count,) = struct.unpack_from("<I", payload)
        offsets = np.frombuffer(payload, np.uint8)[4 : len(payload) - 2 * count]
        values = np.frombuffer(payload, np.uint16, count, len(payload) - 2 * count)
        lasts = np.flatnonzero(offsets < 0x80)
        firsts = np.concatenate([[0], lasts + 1])[:-1]
        shift = 7 * (np.arange(offsets.size) - np.repeat(firsts, lasts - firsts + 1))
        gaps = np.add.reduceat((offsets & 0x7F).astype(np.int64) << shift, firsts)
        out[np.cumsum(gaps + 1) - 1] = values


class DenseXor:
    """slime."""

    name = "dense_xor"

    def encode(self, words: Words, *, base: Words, tensors: Sequence[Tensor]) -> bytes:
        """Code every word."""
        digests = [xxhash.xxh3_64_digest(words[tensor.slice].data) for tensor in tensors]
        return b"".join(digests) + _compress(words ^ base)

    def apply(self, payload: bytes, *, out: Words, tensors: Sequence[Tensor]) -> None:
        """Flip bits."""
        out ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(payload[8 * len(tensors) :]), np.uint16)


class Raw:
    """TRL."""

    name = "raw"

    def encode(self, words: Words, *, base: Words, tensors: Sequence[Tensor]) -> bytes:
        """Code the flat array."""
        places = changed_places(words, base)
        return places.astype("<u4").tobytes() + words[places].tobytes()

    def apply(self, payload: bytes, *, out: Words, tensors: Sequence[Tensor]) -> None:
        """Write values."""
        count = len(payload) // 6
        out[np.frombuffer(payload, "<u4", count)] = np.frombuffer(payload, "<u2", count, 4 * count)


RIVALS: Final[tuple[Format, ...]] = (Pulse(), GapXor(), Leb128(), DenseXor(), Raw())


def bound_bytes(words: Words, *, base: Words, tensors: Sequence[Tensor]) -> float:
    """Return the least bytes by which changes can be coded, knowing the exponent of each word of the base.

    Over each tensor and exponent, n words of which m change cost n H(m/n) bits; and per exponent, each of
    the m changes costs the entropy of the raw-bit differences.
    """
    bits = 0.0
    for tensor in tensors:
        old, new = base[tensor.slice], words[tensor.slice]
        places = changed_places(new, old)
        population = np.bincount((old >> 7 & 0xFF), minlength=256)
        exponents = (old[places] >> 7 & 0xFF).astype(np.int64)
        changes = np.bincount(exponents, minlength=256)
        bits += _choices(population, changes)
        steps = exponents << 16 | (new[places] - old[places])
        _, counts = np.unique(steps, return_counts=True)
        # The entropy of steps within each exponent: that of the pairs less that of the exponents.
        bits += _total_information(counts) - _total_information(changes)
    return bits / 8


def _choices(population: Array, changes: Array) -> float:
    """Return the sum of n H(m/n): the bits of choosing m of n."""
    return _x_log_x(population) - _x_log_x(changes) - _x_log_x(population - changes)


def _total_information(counts: Array) -> float:
    """Return the bits of a sequence with these counts, by its entropy."""
    return _x_log_x(np.array([counts.sum()])) - _x_log_x(counts)


def _x_log_x(numbers: Array) -> float:
    positive = numbers[numbers > 0].astype(np.float64)
    return float((positive * np.log2(positive)).sum())


def _narrowest(numbers: Places, dtypes: Sequence[type[np.generic]]) -> type[np.generic]:
    largest = int(numbers.max())
    return next(dtype for dtype in dtypes if largest <= np.iinfo(dtype).max)  # type: ignore[type-var]
