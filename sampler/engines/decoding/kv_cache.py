"""The key-value cache of rows of different lengths: one left-padded batch in buffers with room to grow.

    columns    0 . . start . . . . . . end . . . room
    row 0      . . . .     a b c d e f     . . .
    row 1      . . . .     - - - g h i     . . .        first column of row 1: that of g

Keys are stored with their rotary position applied, and positions count from a row's own first token. So rows
can be dropped, repeated, padded and moved without changing their contents. A step writes one column in place.
Buffers are copied when they are full, once in ``GROWTH_COLUMNS`` steps, one layer after the other.

Everything that shapes the computation is known to the CPU. What the device needs of it is each row's first
column, which changes only with the set of rows.
"""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

GROWTH_COLUMNS: Final = 64
"""Columns added when a buffer is full: a step bears a 64th of its copy, and the memory is soon used."""


class KeyValueCache:
    """The past of a batch of rows; the model reads ``past`` and appends to it."""

    def __init__(self, first: Sequence[int], *, columns: int, device: torch.device) -> None:
        """Make an empty cache with room; ``first``: the column in which each row's first token will be."""
        self._device = device
        self._buffers: list[Tensor] = []
        """Keys and values of one layer after the other, [rows, heads, columns, head size] with room for more;
        zeros where nothing was written. Columns from ``_start`` to before ``_end`` are in use."""
        self._row_room, self._column_room = len(first), columns
        self._start = self._end = 0
        # A cycle of references would keep the memory of a cache that was dropped.
        self._new_layer = partial(_Layer, weakref.proxy(self))
        self.past = Cache(layer_class_to_replicate=self._new_layer)  # type: ignore[arg-type]  # any callable
        self._set_first(list(first))

    @property
    def width(self) -> int:
        """Columns in use."""
        return self._end - self._start

    @property
    def held_bytes(self) -> int:
        """Memory of all that is allocated."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def make_room(self, columns: int) -> None:
        """Prepare the buffers for ``columns`` more of them."""
        if self._end + columns > self._column_room:
            rows = len(self._first_columns)
            self._move(end=self.width, rows=rows, columns=self.width + columns + GROWTH_COLUMNS)

    def positions(self, columns: int) -> Tensor:
        """Return [rows, columns]: the positions of each row's next tokens; 0 where they are padding."""
        following = torch.arange(self._end, self._end + columns, device=self._device)
        return (following - self._first.unsqueeze(-1)).clamp(min=0)

    def mask(self, columns: int) -> Tensor | None:
        """Return [rows, 1, columns, width + columns], bool: what each of the next tokens reads.

        None where that is all up to itself, so that kernels without a mask can be used.
        """
        is_padded = any(first != self._start for first in self._first_columns)
        if not is_padded and (columns == 1 or self.width == 0):
            return None
        column = torch.arange(self._start, self._end + columns, device=self._device)
        reads = column >= self._first[:, None, None, None]
        if columns > 1:
            query = column[-columns:, None]
            # Padding reads itself, as a softmax over nothing is not defined.
            reads = (reads & (column <= query)) | (column == query)
        return reads

    def padding_mask(self, columns: int) -> Tensor:
        """Return [rows, width + columns], int64: 0 where a row is padded, 1 elsewhere."""
        column = torch.arange(self._start, self._end + columns, device=self._device)
        return (column >= self._first.unsqueeze(-1)).long()

    def append_to_layer(self, number: int, *states: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of every row's next tokens; return those of all tokens."""
        if 2 * number == len(self._buffers):
            self._buffers += [self._zeros_like(new) for new in states]
        keys, values = (
            buffer[: len(self._first_columns), :, self._start : self._end + states[0].shape[2]]
            for buffer in self._buffers[2 * number : 2 * number + 2]
        )
        for used, new in zip((keys, values), states, strict=True):
            used[:, :, self.width :] = new
        return keys, values

    def take_appended(self, columns: int) -> None:
        """Note that the model has appended ``columns`` tokens to every row of ``past``."""
        self._end += columns

    def keep(self, rows: Sequence[int]) -> None:
        """Keep ``rows``, in that order, without repeats. Rows that stay where they are are not copied."""
        if not rows:
            self.past.layers.clear()
            self._buffers.clear()
            self._row_room = self._column_room = self._end = 0
        moved = [(new, old) for new, old in enumerate(rows) if new != old]
        if moved:
            new_rows, old_rows = uploaded(moved, device=self._device).unbind(dim=-1)
            for buffer in self._buffers:
                used = buffer[:, :, self._start : self._end]
                used.index_copy_(0, new_rows, used.index_select(0, old_rows))
        self._set_first([self._first_columns[row] for row in rows])
        self._start = min(self._first_columns, default=0)

    def clear(self) -> None:
        """Drop all rows and keep the buffers, without what they held: it may not have been finite."""
        for buffer in self._buffers:
            buffer.zero_()
        self._start = self._end
        self._set_first([])

    def join(self, other: "KeyValueCache", rows: Sequence[int]) -> None:
        """Add ``rows`` of ``other``, repeats allowed, behind one's own, and free it layer by layer."""
        mine, total = len(self._first_columns), len(self._first_columns) + len(rows)
        end = max(self._end, other.width)
        if total > self._row_room or end > self._column_room:
            end = max(self.width, other.width)
            self._move(end=end, rows=total, columns=end + GROWTH_COLUMNS)
        elif end > self._end:
            self._move(end=end, rows=self._row_room, columns=self._column_room)
        start, index = end - other.width, uploaded(rows, device=self._device)
        for number in range(len(other._buffers)):
            added = other._buffers.pop(0)
            if number == len(self._buffers):
                self._buffers.append(self._zeros_like(added))
            # Left of it may be what other rows left: it is masked, and finite.
            used = added[: len(other._first_columns), :, other._start : other._end]
            self._buffers[number][mine:total, :, start:end] = used.index_select(0, index)
        while len(self.past.layers) < len(other.past.layers):
            self.past.layers.append(self._new_layer())
        first = [other._first_columns[row] - other._start + start for row in rows]
        self._end = end
        self._set_first(self._first_columns + first)
        self._start = min(self._first_columns)

    def _set_first(self, first: list[int]) -> None:
        self._first_columns = first
        self._first = uploaded(first, device=self._device)

    def _zeros_like(self, states: Tensor) -> Tensor:
        return states.new_zeros(self._row_room, states.shape[1], self._column_room, states.shape[3])

    def _move(self, *, end: int, rows: int, columns: int) -> None:
        """Copy what is in use into buffers of ``rows`` by ``columns``, so that it ends at column ``end``."""
        used, start = slice(len(self._first_columns)), end - self.width
        self._row_room, self._column_room = rows, columns
        for number, buffer in enumerate(self._buffers):
            self._buffers[number] = self._zeros_like(buffer)
            self._buffers[number][used, :, start:end] = buffer[used, :, self._start : self._end]
        self._set_first([first + end - self._end for first in self._first_columns])
        self._start, self._end = start, end


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer of a cache, as transformers sees it."""

    def __init__(self, cache: KeyValueCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self._number = len(cache.past.layers)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._cache.append_to_layer(self._number, key_states, value_states)

    def get_seq_length(self) -> int:
        return self._cache.width


def uploaded(values: Sequence[object], *, device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Return ``values``, nested or not, as a tensor on ``device``, without waiting for what it computes.

    A copy from ordinary memory to a CUDA device waits until every step before it is done; from pinned memory
    it does not.
    """
    tensor = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)
