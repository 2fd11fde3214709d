"""Words of this rank's own frames, made of masters that lie on all ranks: one whole tensor at a time.

    each rank: its part of a tensor, rounded --> the rank that gathers it --frame by frame--> frames' owners

Tensors are gathered in the order of the layout, each by the next rank, which forgets it once its words are
dealt out: no rank holds more than one whole tensor, and all together hold one. Parts are rounded before they
travel: two bytes an element, and not four. Frames are dealt out in turn, so that no rank has one more than
another, and ranks follow the same frames in the same order.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from learner.masters.master_words import round_into
from learner.sizing.mesh_sizes import Coordinate, MeshSizes
from node.weights.format.digests import Words
from node.weights.format.layout import Layout, Overlap, TensorSpan


@dataclass(frozen=True, slots=True)
class Sharding:
    """Which axes of a tensor are divided; None: none is."""

    shape: tuple[int, ...]
    shard_axis: int | None = None
    slice_axis: int | None = None
    stage: int = 0
    """The first stage that has the tensor."""

    def part(self, whole: Tensor, at: Coordinate, sizes: MeshSizes) -> Tensor:
        """Return the view of a whole tensor that the rank at a coordinate holds.

        Tensor parallelism slices one axis; FSDP2 then shards the first axis of the slice. Both cut as
        ``torch.chunk`` does, and leave nothing to ranks for which there is no chunk.
        """
        for axis, number, parts in (
            (self.slice_axis, at.slice, sizes.tp),
            (self.shard_axis, at.shard, sizes.dp_shard),
        ):
            if axis is not None:
                chunks = whole.chunk(parts, axis)
                whole = chunks[number] if number < len(chunks) else whole.narrow(axis, 0, 0)
        return whole

    def is_sent_by(self, at: Coordinate) -> bool:
        """Whether the rank at a coordinate speaks for its part, which others may hold too."""
        return (
            at.stage == self.stage
            and at.replica == 0
            and (at.shard == 0 or self.shard_axis is not None)
            and (at.slice == 0 or self.slice_axis is not None)
        )


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
        self._shardings = shardings(tensors, sizes=sizes, group=group)
        self._gatherers = {span.name: number % sizes.ranks for number, span in enumerate(layout.tensors)}
        self._name = ""
        """The tensor that is being dealt out; empty: none."""
        self._whole: Tensor | None = None
        """Its elements, rounded and flattened, on the rank that gathers it."""

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
            self._name, self._whole = "", None
        for frame in frames:
            for piece in self.layout.overlaps(frame):
                if piece.tensor.name != self._name:
                    self._name, self._whole = piece.tensor.name, None
                    self._whole = self._gathered(piece.tensor)
                self._deal(piece, frame, words)
        if frames[-1] == len(self.layout.frames) - 1:
            self._name, self._whole = "", None

    def _gathered(self, span: TensorSpan) -> Tensor | None:
        """Return a tensor, flattened, on the rank that gathers it; None on others, which send their parts."""
        sharding, gatherer = self._shardings[span.name], self._gatherers[span.name]
        dtype: torch.dtype = getattr(torch, span.dtype.name)
        is_here = gatherer == self.rank
        whole = torch.empty(sharding.shape, dtype=dtype, device="cpu" if is_here else "meta")
        for rank in range(self.ranks):
            at = self._sizes.coordinate(rank)
            part = sharding.part(whole, at, self._sizes)
            if part.numel() == 0 or not sharding.is_sent_by(at) or self.rank not in (rank, gatherer):
                continue
            rounded = torch.empty(part.numel(), dtype=dtype)
            if rank == self.rank:
                round_into(rounded, self._flat[span.name])
            self._pass(rounded, rank, gatherer)
            if is_here:
                part.copy_(rounded.view(part.shape))
        return whole.view(-1) if is_here else None

    def _deal(self, piece: Overlap, frame: int, words: Callable[[int], Words]) -> None:
        """Hand the words that a frame and the gathered tensor have in common to the frame's owner."""
        owner, gatherer = self.owner(frame), self._gatherers[self._name]
        if self.rank not in (owner, gatherer):
            return
        first, count = _elements(piece)
        dtype: torch.dtype = getattr(torch, piece.tensor.dtype.name)
        elements = torch.empty(count, dtype=dtype) if self._whole is None else self._whole[first:][:count]
        self._pass(elements, gatherer, owner)
        if self.rank == owner:
            to = words(frame)[piece.frame_word :][: piece.words].view(np.uint8)
            to[count * dtype.itemsize :] = 0  # the upper half of a last word belongs to no element
            to[: count * dtype.itemsize] = elements.view(torch.uint8).numpy()

    def _pass(self, elements: Tensor, sender: int, receiver: int) -> None:
        """Send a flat tensor from one rank, or receive it there, unless it is the same."""
        if sender != receiver:
            data = elements.view(torch.uint8)
            if self.rank == sender:
                dist.send(data, receiver, self._group)
            else:
                dist.recv(data, sender, self._group)


def shardings(tensors: Mapping[str, Tensor], *, sizes: MeshSizes, group: ProcessGroup) -> dict[str, Sharding]:
    """Tell all ranks the tensors of this one's stage; return those of all stages. Every rank calls this."""
    own = {name: asdict(sharding_of(tensor)) for name, tensor in tensors.items()}
    found: dict[str, Sharding] = {}
    for stage in range(sizes.pp):
        told = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
        length = torch.tensor([len(told)])
        first = stage * sizes.ranks // sizes.pp
        dist.broadcast(length, src=first, group=group)
        heard = told if dist.get_rank() == first else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(heard, src=first, group=group)
        for name, of_tensor in json.loads(heard.numpy().tobytes()).items():
            shape = tuple(of_tensor["shape"])
            found.setdefault(name, Sharding(**of_tensor | {"shape": shape, "stage": stage}))
    return found


def sharding_of(tensor: Tensor) -> Sharding:
    """Return how ranks of one stage share a tensor."""
    axes: dict[str, int] = {}
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        for name, placed in zip(names, tensor.placements, strict=True):
            if not placed.is_replicate():
                axes[name] = placed.dim  # type: ignore[attr-defined]
    return Sharding(tuple(tensor.shape), axes.get("dp_shard"), axes.get("tp"))


def _elements(piece: Overlap) -> tuple[int, int]:
    """Return the first element of a tensor that lies in a piece, and how many do."""
    width = piece.tensor.dtype.element_bytes
    first = 2 * piece.tensor_word // width
    return first, min(2 * piece.words // width, piece.tensor.elements - first)
