"""Which part of a tensor each rank holds, and where that part's elements lie; pure.

Tensor parallelism slices one axis; FSDP2 then shards the first axis of the slice. Both cut as ``torch.chunk``
does: into equal runs, the last of which may be shorter or empty. So a part is a box: a run of the first axis,
a run of the second, and all of the others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learner.sizing.mesh_sizes import Coordinate, MeshSizes

Places = slice | NDArray[np.int64]
"""Elements of a flat array."""


@dataclass(frozen=True, slots=True)
class Run:
    """Some indices of an axis."""

    first: int
    count: int

    def cut(self, part: int, *, parts: int) -> "Run":
        """Return one of the runs that ``torch.chunk`` makes of this one."""
        size = -(-self.count // parts)
        start = min(part * size, self.count)
        return Run(self.first + start, min(size, self.count - start))


@dataclass(frozen=True, slots=True)
class Sharding:
    """Which axes of a tensor are divided; None: none is."""

    shape: tuple[int, ...]
    shard_axis: int | None = None
    slice_axis: int | None = None
    stages: tuple[int, ...] = (0,)
    """The stages that have the tensor, ascending."""

    def box(self, at: Coordinate, sizes: MeshSizes) -> "Box":
        """Return the part that the rank at a coordinate holds; it is empty on other stages.

        Raises:
            ValueError: an axis beyond the second is divided.
        """
        runs = [Run(0, length) for length in (*self.shape, 1, 1)[: max(2, len(self.shape))]]
        for axis, part, parts in (
            (self.slice_axis, at.slice, sizes.tp),
            (self.shard_axis, at.shard, sizes.dp_shard),
        ):
            if axis is not None:
                if axis > 1:
                    raise ValueError(f"axis {axis} of a tensor of shape {self.shape} is divided")
                runs[axis] = runs[axis].cut(part, parts=parts)
        if at.stage not in self.stages:
            runs[0] = Run(0, 0)
        rest = math.prod(self.shape[2:])
        whole = self.shape[1] if len(self.shape) > 1 else 1
        return Box(
            runs[0], Run(runs[1].first * rest, runs[1].count * rest), whole * rest if self.shape else 1
        )

    def is_sent_by(self, at: Coordinate) -> bool:
        """Whether the rank at a coordinate speaks for its part, which others may hold too."""
        return (
            at.stage == self.stages[0]
            and at.replica == 0
            and (at.shard == 0 or self.shard_axis is not None)
            and (at.slice == 0 or self.slice_axis is not None)
        )


@dataclass(frozen=True, slots=True)
class Box:
    """Rows of a tensor, taken as a matrix, and columns of them."""

    rows: Run
    columns: Run
    width: int
    """Columns of the whole matrix."""

    def count(self, first: int, count: int) -> int:
        """Return how many of a run of the tensor's elements the box has."""
        start = max(first, self.rows.first * self.width)
        end = min(first + count, (self.rows.first + self.rows.count) * self.width)
        return max(0, self._before(end) - self._before(start)) if start < end else 0

    def within(self, first: int, count: int) -> tuple[Places, Places, int]:
        """Return what the box has of a run of the tensor's elements.

        Returns:
            Where these elements lie in the box, where they lie in the run, and how many they are.
        """
        if self.columns.count == self.width:
            begin = max(first, self.rows.first * self.width)
            end = min(first + count, (self.rows.first + self.rows.count) * self.width)
            here = max(0, end - begin)
            start = begin - self.rows.first * self.width if here else 0
            return slice(start, start + here), slice(begin - first, begin - first + here), here
        row, column = np.divmod(np.arange(first, first + count), self.width)
        row, column = row - self.rows.first, column - self.columns.first
        is_here = (row >= 0) & (row < self.rows.count) & (column >= 0) & (column < self.columns.count)
        places = (row * self.columns.count + column)[is_here]
        return places, np.flatnonzero(is_here), len(places)

    def _before(self, element: int) -> int:
        """Return how many elements before this one lie in the box's columns, whatever their row."""
        row, column = divmod(element, self.width)
        return row * self.columns.count + min(max(column - self.columns.first, 0), self.columns.count)


def coordinates(sizes: MeshSizes) -> Sequence[Coordinate]:
    """Return the places of all ranks, in order."""
    return [sizes.coordinate(rank) for rank in range(sizes.ranks)]
