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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

GROWTH_COLUMNS: Final = 64
"""Columns added when a buffer is full: a step bears a 64th of its copy, and the memory is soon used."""


@dataclass(slots=True)
class _Window:
    """The part of the buffers in use: ``rows`` rows, columns from ``start`` to before ``end``."""

    rows: int
    start: int
    end: int
    row_room: int
    column_room: int


class KeyValueCache:
    """The past of a batch of rows; the model reads ``past`` and appends to it."""

    def __init__(self, first: Sequence[int], *, columns: int, device: torch.device) -> None:
        """Make an empty cache with room; ``first``: the column in which each row's first token will be."""
        self._window = _Window(len(first), 0, 0, len(first), columns)
        self.past = Cache(layer_class_to_replicate=partial(_Layer, self._window))  # type: ignore[arg-type]  # any callable
        self._device = device
        self._set_first(list(first))

    @property
    def width(self) -> int:
        """Columns in use."""
        return self._window.end - self._window.start

    @property
    def held_bytes(self) -> int:
        """Memory of all that is allocated."""
        return sum(buffer.nbytes for buffer in self._buffers())

    def make_room(self, columns: int) -> None:
        """Prepare the buffers for ``columns`` more of them."""
        window = self._window
        if window.end + columns > window.column_room:
            self._move(end=self.width, rows=window.rows, columns=self.width + columns + GROWTH_COLUMNS)

    def positions(self, columns: int) -> Tensor:
        """Return [rows, columns]: the positions of each row's next tokens; 0 where they are padding."""
        end = self._window.end
        following = torch.arange(end, end + columns, device=self._device)
        return (following - self._first.unsqueeze(-1)).clamp(min=0)

    def mask(self, columns: int) -> Tensor | None:
        """Return [rows, 1, columns, width + columns], bool: what each of the next tokens reads.

        None where that is all up to itself, so that kernels without a mask can be used.
        """
        padded, window = self._is_padded, self._window
        if not padded and (columns == 1 or self.width == 0):
            return None
        column = torch.arange(window.start, window.end + columns, device=self._device)
        reads = column >= self._first[:, None, None, None]
        if columns > 1:
            query = column[-columns:, None]
            # Padding reads itself, as a softmax over nothing is not defined.
            reads = (reads & (column <= query)) | (column == query)
        return reads

    def padding_mask(self, columns: int) -> Tensor:
        """Return [rows, width + columns], int64: 0 where a row is padded, 1 elsewhere."""
        window = self._window
        column = torch.arange(window.start, window.end + columns, device=self._device)
        return (column >= self._first.unsqueeze(-1)).long()

    def take_appended(self, columns: int) -> None:
        """Note that the model has appended ``columns`` tokens to every row of ``past``."""
        self._window.end += columns

    def keep(self, rows: Sequence[int]) -> None:
        """Keep ``rows``, in that order, without repeats. Rows that stay where they are are not copied."""
        if not rows:
            self._layers.clear()
            self._window.row_room = self._window.column_room = self._window.end = 0
        moved = [(new, old) for new, old in enumerate(rows) if new != old]
        if moved:
            new_rows, old_rows = self._uploaded(moved).unbind(dim=-1)
            for buffer in self._buffers():
                used = buffer[:, :, self._window.start : self._window.end]
                used.index_copy_(0, new_rows, used.index_select(0, old_rows))
        self._window.rows = len(rows)
        self._set_first([self._first_columns[row] for row in rows])
        self._window.start = min(self._first_columns, default=0)

    def clear(self) -> None:
        """Drop all rows and keep the buffers, without what they held: it may not have been finite."""
        for buffer in self._buffers():
            buffer.zero_()
        self._window.rows = 0
        self._window.start = self._window.end
        self._set_first([])

    def join(self, other: "KeyValueCache", rows: Sequence[int]) -> None:
        """Add ``rows`` of ``other``, repeats allowed, behind one's own, and free it layer by layer."""
        mine, theirs, total = self._window, other._window, self._window.rows + len(rows)
        end = max(mine.end, other.width)
        if total > mine.row_room or end > mine.column_room:
            end = max(self.width, other.width)
            self._move(end=end, rows=total, columns=end + GROWTH_COLUMNS)
        elif end > mine.end:
            self._move(end=end, rows=mine.row_room, columns=mine.column_room)
        start = end - other.width
        index = self._uploaded(rows)
        for number, source in enumerate(other._layers):
            layer = self._layer(number, like=source)
            for buffer, added in zip(layer.buffers, source.buffers, strict=True):
                # Left of it may be what other rows left: it is masked, and finite.
                used = added[: theirs.rows, :, theirs.start : theirs.end]
                buffer[mine.rows : total, :, start:end] = used.index_select(0, index)
            source.free()
        first = [other._first_columns[row] - theirs.start + start for row in rows]
        mine.rows, mine.end = total, end
        self._set_first(self._first_columns + first)
        mine.start = min(self._first_columns)

    @property
    def _layers(self) -> "list[_Layer]":
        return cast("list[_Layer]", self.past.layers)

    def _buffers(self) -> list[Tensor]:
        return [buffer for layer in self._layers for buffer in layer.buffers]

    def _set_first(self, first: list[int]) -> None:
        self._first_columns = first
        self._first = self._uploaded(first)

    def _uploaded(self, numbers: Sequence[object]) -> Tensor:
        return uploaded(numbers, dtype=torch.long, device=self._device)

    @property
    def _is_padded(self) -> bool:
        return any(first != self._window.start for first in self._first_columns)

    def _move(self, *, end: int, rows: int, columns: int) -> None:
        """Copy what is in use into buffers of ``rows`` by ``columns``, so that it ends at column ``end``."""
        window, width = self._window, self.width
        for layer in self._layers:
            layer.keys = layer.values = None
            for number, buffer in enumerate(layer.buffers):
                used = buffer[: window.rows, :, window.start : window.end]
                moved = buffer.new_zeros(rows, buffer.shape[1], columns, buffer.shape[3])
                moved[: window.rows, :, end - width : end] = used
                layer.buffers[number] = moved
        shift = end - window.end
        window.row_room, window.column_room = rows, columns
        window.start, window.end = end - width, end
        self._set_first([first + shift for first in self._first_columns])

    def _layer(self, number: int, *, like: "_Layer") -> "_Layer":
        """Return a layer of this cache, made if there are only those before it."""
        if number == len(self._layers):
            layer = _Layer(self._window)
            layer.make_buffers(like.buffers)
            self._layers.append(layer)
        return self._layers[number]


def uploaded(values: Sequence[object], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``values``, nested or not, as a tensor on ``device``, without waiting for what it computes.

    A copy from ordinary memory to a CUDA device waits until every step before it is done; from pinned memory
    it does not.
    """
    tensor = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer, as views of buffers that have room for more."""

    def __init__(self, window: _Window) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._window = window
        self.buffers: list[Tensor] = []
        """Keys and values, [rows, heads, columns, head size]; zeros where nothing was written."""

    def make_buffers(self, like: Sequence[Tensor]) -> None:
        """Allocate a buffer for each tensor of ``like``."""
        rows, columns = self._window.row_room, self._window.column_room
        self.buffers = [tensor.new_zeros(rows, tensor.shape[1], columns, tensor.shape[3]) for tensor in like]
        self.is_initialized = True

    def free(self) -> None:
        """Release the buffers and all views of them."""
        self.keys = self.values = None
        self.buffers = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.buffers:
            self.make_buffers((key_states, value_states))
        window = self._window
        end = window.end + key_states.shape[2]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[: window.rows, :, window.end : end] = states
        self.keys, self.values = (buffer[: window.rows, :, window.start : end] for buffer in self.buffers)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self._window.end - self._window.start
