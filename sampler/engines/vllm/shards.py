"""Words of a version in parameters, each of which may be a rectangle of one of the layout's tensors.

    frame     |----------- words ------------|         in the order of the layout
    tensor       |..xx|..xx|..xx|                      its rows; x: the columns that are here

A run of words in row-major order is three rectangles at most: the end of a row, whole rows, part of a row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from node.weights.format.digests import Words
from node.weights.format.dtypes import BFLOAT16
from node.weights.format.layout import FrameSpan, Layout
from sampler.engines.words.torch_words import halves_of, put_words, words_in


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The part of a tensor that is here, taken as [rows, columns]: a rectangle of it, or all of it."""

    values: Tensor
    first_row: int
    first_column: int
    whole_columns: int
    """Columns of the whole tensor."""

    def of(self, whole: Tensor) -> Tensor:
        """Return the same rectangle of the whole tensor."""
        rows, columns = self.values.shape
        whole = whole.reshape(-1, self.whole_columns)
        return whole[self.first_row : self.first_row + rows, self.first_column : self.first_column + columns]


class ParameterWords:
    """See ``ModelWords``; what is not here is left as it is, and read as zero."""

    def __init__(self, shards: Mapping[str, Shard], layout: Layout) -> None:
        """Look at the words in ``shards``, by the names of the layout's tensors."""
        self._shards = shards
        self._layout = layout
        self._numbers = {frame.start_word: number for number, frame in enumerate(layout.frames)}

    def read(self, frame: FrameSpan) -> Words:
        words = np.zeros(frame.words, np.uint16)
        for part, place in self._parts(frame, halves_of(words)):
            place.copy_(words_in(part))
        return words

    def write(self, frame: FrameSpan, words: Words) -> None:
        for part, place in self._parts(frame, halves_of(words)):
            put_words(part, place)

    def memory(self, frame: FrameSpan) -> Words | None:
        return None

    def _parts(self, frame: FrameSpan, words: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of parameters, float32 where these hold bfloat16, and their part of ``words``."""
        for overlap in self._layout.overlaps(self._numbers[frame.start_word]):
            shard, span = self._shards[overlap.tensor.name], overlap.tensor
            is_wide = span.dtype is BFLOAT16 and shard.values.dtype is torch.float32
            # An element that is not wide has as many words as bytes / 2.
            held = shard.values if is_wide else shard.values.view(torch.int16)
            element_words = held.shape[1] // shard.values.shape[1]
            row_words = shard.whole_columns * element_words
            first_column = shard.first_column * element_words
            begin = overlap.frame_word
            for row, rows, column, columns in _rectangles(overlap.tensor_word, overlap.words, row_words):
                place = words[begin : begin + rows * columns].view(rows, columns)
                begin += rows * columns
                top, bottom = _common(row, rows, shard.first_row, held.shape[0])
                left, right = _common(column, columns, first_column, held.shape[1])
                if top < bottom and left < right:
                    yield (
                        held[
                            top - shard.first_row : bottom - shard.first_row,
                            left - first_column : right - first_column,
                        ],
                        place[top - row : bottom - row, left - column : right - column],
                    )


def _rectangles(start: int, words: int, row_words: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut ``words`` in row-major order into rectangles, three at most: row, rows, column, columns."""
    while words:
        row, column = divmod(start, row_words)
        if column or words < row_words:
            rows, columns = 1, min(words, row_words - column)
        else:
            rows, columns = words // row_words, row_words
        yield row, rows, column, columns
        start += rows * columns
        words -= rows * columns


def _common(first: int, count: int, other_first: int, other_count: int) -> tuple[int, int]:
    return max(first, other_first), min(first + count, other_first + other_count)
