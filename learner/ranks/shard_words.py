"""A version's words on the first rank, a frame at a time, made of masters that lie on all ranks.

    first rank: read(frame) --number of the frame--> every rank: rounds its part of it
                     ^                                     |
                     `--------------words------------------'

Ranks round what they have, so two bytes an element travel and not four. What several ranks hold, the first of
them sends. One frame is exchanged at a time.
"""

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from learner.ranks.boxes import Box, Places, Sharding, coordinates
from learner.ranks.mesh_sizes import MeshSizes
from learner.training.master_words import MasterWords, round_into
from node.weights.format.digests import Words
from node.weights.format.layout import Layout

_END: Final = -1


class ShardWords(MasterWords):
    """Rounds masters to the words of a layout, together with the other ranks."""

    def __init__(
        self, tensors: Mapping[str, Tensor], layout: Layout, *, sizes: MeshSizes, group: ProcessGroup
    ) -> None:
        """Read this rank's part of ``tensors``.

        Args:
            group: all ranks, for this exchange alone; on CPU tensors.
        """
        with torch.no_grad():
            local = {
                name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
                for name, tensor in tensors.items()
            }
        super().__init__(local, layout)
        self._shardings = shardings(tensors, sizes=sizes, group=group)
        self._ranks = coordinates(sizes)
        self._boxes = [
            {name: sharding.box(at, sizes) for name, sharding in self._shardings.items()}
            for at in self._ranks
        ]
        self._sizes = sizes
        self._group = group
        self._rank = dist.get_rank()
        self._lock = threading.Lock()

    def read(self, frame: int, words: Words) -> None:
        """Write the words of one frame, as many as it has; floats rounded to nearest even. First rank."""
        with self._lock:
            dist.broadcast(torch.tensor([frame]), src=0, group=self._group)
            self._exchange(frame, words)

    def follow(self) -> None:
        """Send this rank's parts of the frames that the first asks for, until it needs no more."""
        while True:
            number = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(number, src=0, group=self._group)
            if (frame := int(number)) == _END:
                return
            self._exchange(frame, None)

    def end(self) -> None:
        """Tell the other ranks that no frame is asked for any more. First rank."""
        with self._lock:
            dist.broadcast(torch.tensor([_END]), src=0, group=self._group)

    def _exchange(self, frame: int, words: Words | None) -> None:
        """Fill ``words``, on the first rank; send, on another."""
        for rank in range(len(self._ranks)):
            if rank != self._rank and words is None:
                continue
            parts = list(self._parts(frame, rank))
            if not parts:
                continue
            if rank == self._rank:
                sent = [self._rounded(*part) for part in parts]
                if words is None:
                    dist.send(torch.cat([one.view(torch.uint8) for one in sent]), dst=0, group=self._group)
                    continue
            else:
                lengths = [count * self._width(name) for name, _, _, count, _ in parts]
                received = torch.empty(sum(lengths), dtype=torch.uint8)
                dist.recv(received, src=rank, group=self._group)
                sent = list(torch.split(received, lengths))
            assert words is not None
            for (name, _, to, _, target), values in zip(parts, sent, strict=True):
                piece = torch.from_numpy(words[target]).view(self._dtype(name))
                piece[to if isinstance(to, slice) else torch.from_numpy(to)] = values.view(piece.dtype)

    def _parts(self, frame: int, rank: int) -> Iterator[tuple[str, Places, Places, int, slice]]:
        """Yield what a rank sends of a frame: tensor, where from, where to in its piece, count, the piece."""
        for piece in self.layout.overlaps(frame):
            name = piece.tensor.name
            if not self._shardings[name].is_sent_by(self._ranks[rank]):
                continue
            width = piece.tensor.dtype.element_bytes
            first = 2 * piece.tensor_word // width
            count = min(2 * piece.words // width, piece.tensor.elements - first)
            box: Box = self._boxes[rank][name]
            source, to, here = box.within(first, count)
            if here:
                yield name, source, to, here, slice(piece.frame_word, piece.frame_word + piece.words)

    def _rounded(self, name: str, source: Places, to: Places, count: int, target: slice) -> Tensor:
        flat = self._flat[name]
        values = flat[source if isinstance(source, slice) else torch.from_numpy(source).to(flat.device)]
        rounded = torch.empty(count, dtype=self._dtype(name))
        round_into(rounded, values)
        return rounded

    def _dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._spans[name].dtype.name)
        return dtype

    def _width(self, name: str) -> int:
        return self._spans[name].dtype.element_bytes


def shardings(tensors: Mapping[str, Tensor], *, sizes: MeshSizes, group: ProcessGroup) -> dict[str, Sharding]:
    """Tell all ranks the tensors of this one's stage; return those of all stages. Every rank calls this."""
    own = {name: asdict(_sharding(tensor)) for name, tensor in tensors.items()}
    found: dict[str, Sharding] = {}
    for number in range(sizes.pp):
        told = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
        length = torch.tensor([len(told)])
        first = number * sizes.ranks // sizes.pp
        dist.broadcast(length, src=first, group=group)
        heard = told if dist.get_rank() == first else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(heard, src=first, group=group)
        for name, of_tensor in json.loads(heard.numpy().tobytes()).items():
            stages = (*found[name].stages, number) if name in found else (number,)
            found[name] = Sharding(**of_tensor | {"shape": tuple(of_tensor["shape"]), "stages": stages})
    return found


def _sharding(tensor: Tensor) -> Sharding:
    axes: dict[str, int] = {}
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        for name, placed in zip(names, tensor.placements, strict=True):
            if not placed.is_replicate():
                axes[name] = placed.dim  # type: ignore[attr-defined]
    return Sharding(tuple(tensor.shape), axes.get("dp_shard"), axes.get("tp"))
