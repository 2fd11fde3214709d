"""Words of this rank's own frames, made of masters that lie on all ranks: a whole tensor a rank at a time.

    each rank: its part of a tensor, rounded --> the rank that gathers it --frame by frame--> frames' owners

Tensors are gathered in the order of the layout: as many at once as there are ranks, each by a rank of its
own, unless they are together larger than the largest one. A rank forgets its tensor once the words are dealt
out. So no rank holds more than one whole tensor, and parts of others that together are no larger than the
largest. What travels waits for nothing else that does. Parts are rounded before, to two bytes an element
instead of four. Frames are dealt out in turn, so that no rank has one more than another, and ranks follow the
same frames in the same order.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from learner.masters.master_words import round_into
from learner.ranks.words.tensor_shards import shardings
from learner.sizing.mesh_sizes import MeshSizes
from node.weights.format.digests import Words
from node.weights.format.layout import Layout, Overlap


class DealtWords:
    """Rounds masters to the words of a layout, together with the other ranks."""

    def __init__(
        self, tensors: Mapping[str, Tensor], layout: Layout, *, sizes: MeshSizes, group: ProcessGroup
    ) -> None:
        """Read this rank's part of ``tensors``.

        Args:
            group: all ranks, for this exchange and in one thread of each; on CPU tensors.
        """
        with torch.no_grad():
            self._flat = {
                name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().view(-1)
                for name, tensor in tensors.items()
            }
        self.layout: Final = layout
        self.rank: Final = dist.get_rank(group)
        self.ranks: Final = sizes.ranks
        self._sizes = sizes
        self._group = group
        self.shardings: Final = shardings(tensors, sizes=sizes, group=group)
        self._most_words = max(span.words for span in layout.tensors)
        """In all tensors that are gathered at once."""
        self._numbers = {span.name: number for number, span in enumerate(layout.tensors)}
        self._gathered = range(0)
        """Numbers of the tensors that are being dealt out."""
        self._whole = torch.empty(0)
        """The one of them that this rank gathered, rounded and flattened."""

    def owner(self, frame: int) -> int:
        """Return the rank that has a frame."""
        return frame % self.ranks

    def own(self, frames: Sequence[int], *, rank: int | None = None) -> list[int]:
        """Return which of some frames are this rank's, or another's."""
        return [frame for frame in frames if self.owner(frame) == (self.rank if rank is None else rank)]

    def rounds(self, frames: int) -> list[list[int]]:
        """Return rounds of every rank's next ``frames`` frames, ascending."""
        count, size = len(self.layout.frames), frames * self.ranks
        return [list(range(start, min(start + size, count))) for start in range(0, count, size)]

    def fill(self, frames: Sequence[int], words: Callable[[int], Words]) -> None:
        """Write the words of this rank's frames among ``frames``; floats rounded to nearest even.

        All ranks call it with the same frames, ascending, and from one pass over the masters to the next from
        the first frame on.

        Args:
            words: returns where the words of a frame belong.
        """
        if frames[0] == 0:
            self._forget()
        passed: list[dist.Work] = []
        for frame in frames:
            for piece in self.layout.overlaps(frame):
                if (number := self._numbers[piece.tensor.name]) not in self._gathered:
                    _wait(passed)
                    self._gather(self._together(number))
                passed += self._deal(piece, frame, words)
        _wait(passed)
        if frames[-1] == len(self.layout.frames) - 1:
            self._forget()

    def _forget(self) -> None:
        self._gathered, self._whole = range(0), torch.empty(0)

    def _gatherer(self, tensor: int) -> int:
        """Return the rank that gathers a tensor; of tensors that are gathered at once each has another."""
        return tensor % self.ranks

    def _together(self, first: int) -> range:
        """Return the tensors from ``first`` on that are gathered at once."""
        tensors, words = self.layout.tensors[first:][: self.ranks], 0
        for number, span in enumerate(tensors, first):
            words += span.words
            if words > self._most_words:
                return range(first, number)
        return range(first, first + len(tensors))

    def _gather(self, tensors: range) -> None:
        """Gather tensors, and forget those before; the ranks that do not gather one send their parts."""
        self._forget()
        passed: list[dist.Work] = []
        arrived: list[tuple[Tensor, Tensor]] = []
        """Places in the whole tensor, and the parts that belong there."""
        for number in tensors:
            span, gatherer = self.layout.tensors[number], self._gatherer(number)
            sharding, is_here = self.shardings[span.name], gatherer == self.rank
            dtype: torch.dtype = getattr(torch, span.dtype.name)
            whole = torch.empty(sharding.shape, dtype=dtype, device="cpu" if is_here else "meta")
            for rank in range(self.ranks):
                at = self._sizes.coordinate(rank)
                place = sharding.part(whole, at, self._sizes)
                if place.numel() == 0 or not sharding.is_sent_by(at) or self.rank not in (rank, gatherer):
                    continue
                is_in_place = is_here and place.is_contiguous()
                part = place.view(-1) if is_in_place else torch.empty(place.numel(), dtype=dtype)
                if rank == self.rank:
                    round_into(part, self._flat[span.name])
                passed += self._pass(part, rank, gatherer)
                if is_here and not is_in_place:
                    arrived.append((place, part))
            if is_here:
                self._whole = whole.view(-1)
        _wait(passed)
        for place, part in arrived:
            place.copy_(part.view(place.shape))
        self._gathered = tensors

    def _deal(self, piece: Overlap, frame: int, words: Callable[[int], Words]) -> list[dist.Work]:
        """Begin to hand the words that a frame and a gathered tensor have in common to the frame's owner."""
        owner, gatherer = self.owner(frame), self._gatherer(self._numbers[piece.tensor.name])
        if self.rank not in (owner, gatherer):
            return []
        first, count = _elements(piece)
        elements = self._whole[first:][:count] if self.rank == gatherer else torch.empty(0)
        if self.rank == owner:
            to = torch.from_numpy(words(frame)[piece.frame_word :][: piece.words].view(np.uint8))
            size_bytes = count * piece.tensor.dtype.element_bytes
            to[size_bytes:] = 0  # the upper half of a last word belongs to no element
            to = to[:size_bytes]
            if owner == gatherer:
                to.copy_(elements.view(torch.uint8))
            else:
                elements = to
        return self._pass(elements, gatherer, owner)

    def _pass(self, elements: Tensor, sender: int, receiver: int) -> list[dist.Work]:
        """Begin to send a flat tensor from one rank, or to receive it there, unless it is the same."""
        if sender == receiver:
            return []
        data = elements.view(torch.uint8)
        if self.rank == sender:
            begun = dist.isend(data, receiver, self._group)
        else:
            begun = dist.irecv(data, sender, self._group)
        assert begun is not None  # this rank is of the group
        return [begun]


def _wait(passed: list[dist.Work]) -> None:
    """Wait until all has arrived, and forget it. Raises RuntimeError: another rank is gone."""
    while passed:
        passed.pop(0).wait()


def _elements(piece: Overlap) -> tuple[int, int]:
    """Return the first element of a tensor that lies in a piece, and how many do."""
    width = piece.tensor.dtype.element_bytes
    first = 2 * piece.tensor_word // width
    return first, min(2 * piece.words // width, piece.tensor.elements - first)
