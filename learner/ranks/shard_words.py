"""Words of this rank's own frames, made of masters that lie on all ranks.

    every rank: rounds what it holds of each frame of a round --words--> the frame's owner

Ranks round what they have, so two bytes an element travel and not four. All ranks call ``fill`` with the same
frames, and only then.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from learner.ranks.boxes import Sharding
from learner.ranks.frame_plan import FramePlan, Part
from learner.sizing.mesh_sizes import MeshSizes
from learner.training.master_words import round_into
from node.weights.format.digests import Words
from node.weights.format.layout import Layout

_ALIGNED_BYTES: Final = 8
"""Parts travel one after the other, each from a multiple of this on: the widest element's."""


class ShardWords:
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
        self.plan = FramePlan(layout, shardings(tensors, sizes=sizes, group=group), sizes)
        self.rank: Final = dist.get_rank(group)
        self._ranks: Final = sizes.ranks
        self._group = group

    def fill(self, frames: Sequence[int], words: Callable[[int], Words]) -> None:
        """Write the words of this rank's frames among ``frames``; floats rounded to nearest even.

        Args:
            words: returns where the words of a frame belong.
        """
        owners, own = self.plan.owners, [f for f in frames if self.plan.owners[f] == self.rank]
        sent = [
            [part for f in frames if owners[f] == rank != self.rank for part in self._parts(f, self.rank)]
            for rank in range(self._ranks)
        ]
        expected = [
            [(f, part) for f in own if rank != self.rank for part in self._parts(f, rank)]
            for rank in range(self._ranks)
        ]
        of_sent = [sum(_padded(part) for part in parts) for parts in sent]
        of_expected = [sum(_padded(part) for _, part in parts) for parts in expected]
        out, received = np.empty(sum(of_sent), np.uint8), np.empty(sum(of_expected), np.uint8)
        start = 0
        for part in (part for parts in sent for part in parts):
            self._round(part, into=_elements(out[start : start + part.size_bytes], part))
            start += _padded(part)
        dist.all_to_all_single(
            torch.from_numpy(received),
            torch.from_numpy(out),
            of_expected,
            of_sent,
            group=self._group,
        )
        start = 0
        for frame, part in (one for parts in expected for one in parts):
            _place(part, _elements(received[start : start + part.size_bytes], part), words(frame))
            start += _padded(part)
        for frame in own:
            for part in self._parts(frame, self.rank):
                rounded = torch.empty(part.count, dtype=_dtype(part))
                self._round(part, into=rounded)
                _place(part, rounded, words(frame))

    def _parts(self, frame: int, sender: int) -> list[Part]:
        return list(self.plan.parts(frame, sender=sender))

    def _round(self, part: Part, *, into: Tensor) -> None:
        source, _ = part.places()
        flat = self._flat[part.piece.tensor.name]
        at = source if isinstance(source, slice) else torch.from_numpy(source).to(flat.device)
        round_into(into, flat[at])


def _padded(part: Part) -> int:
    return -(-part.size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _dtype(part: Part) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, part.piece.tensor.dtype.name)
    return dtype


def _elements(data: NDArray[np.uint8], part: Part) -> Tensor:
    return torch.from_numpy(data).view(_dtype(part))


def _place(part: Part, values: Tensor, words: Words) -> None:
    """Write elements to where they belong in the words of their frame."""
    piece = words[part.piece.frame_word :][: part.piece.words]
    width = part.piece.tensor.dtype.element_bytes
    end = 2 * part.piece.tensor_word // width + 2 * part.piece.words // width
    if end > part.piece.tensor.elements:
        piece.view(np.uint8)[-1] = 0  # The upper half of the last word belongs to no element.
    _, to = part.places()
    elements = torch.from_numpy(piece).view(values.dtype)
    elements[to if isinstance(to, slice) else torch.from_numpy(to)] = values


def shardings(tensors: Mapping[str, Tensor], *, sizes: MeshSizes, group: ProcessGroup) -> dict[str, Sharding]:
    """Tell all ranks the tensors of this one's stage; return those of all stages. Every rank calls this."""
    own = {name: asdict(sharding_of(tensor)) for name, tensor in tensors.items()}
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


def sharding_of(tensor: Tensor) -> Sharding:
    """Return how ranks of one stage share a tensor."""
    axes: dict[str, int] = {}
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        for name, placed in zip(names, tensor.placements, strict=True):
            if not placed.is_replicate():
                axes[name] = placed.dim  # type: ignore[attr-defined]
    return Sharding(tuple(tensor.shape), axes.get("dp_shard"), axes.get("tp"))
