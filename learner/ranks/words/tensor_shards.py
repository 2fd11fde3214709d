"""Which part of each tensor a rank holds, and whole tensors on the first rank made of them, one at a time.

gather    parts on all ranks --> a whole tensor on the first
deal      a whole tensor on the first --> its parts on all ranks
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from learner.sizing.mesh_sizes import Coordinate, MeshSizes


@dataclass(frozen=True, slots=True)
class Sharding:
    """Which axes of a tensor are divided; None: none is."""

    shape: tuple[int, ...]
    shard_axis: int | None = None
    slice_axis: int | None = None
    stages: tuple[int, ...] = (0,)
    """Stages that have the tensor: the first and the last of a pipeline both have a tied embedding."""
    is_trained: bool = True

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
            at.stage == self.stages[0]
            and at.replica == 0
            and (at.shard == 0 or self.shard_axis is not None)
            and (at.slice == 0 or self.slice_axis is not None)
        )


class TensorShards:
    """See ``TensorParts``; the first rank alone has what is whole. All ranks call each method."""

    def __init__(self, of_tensors: Mapping[str, Sharding], *, sizes: MeshSizes, group: ProcessGroup) -> None:
        """Gather and deal tensors by the names of ``of_tensors``.

        Args:
            group: all ranks, for this exchange and in one thread of each; on CPU tensors.
        """
        names = sorted(of_tensors, key=str.encode)
        self.trained: Final = {
            name: torch.Size(of_tensors[name].shape) for name in names if of_tensors[name].is_trained
        }
        self._of_tensors = of_tensors
        self._sizes = sizes
        self._group = group
        self._rank = dist.get_rank(group)

    def gather(self, name: str, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See ``TensorParts``."""
        sharding = self._of_tensors[name]
        whole = torch.empty(sharding.shape, dtype=dtype, device="cpu" if self._rank == 0 else "meta")
        for rank in range(self._sizes.ranks):
            at = self._sizes.coordinate(rank)
            place = sharding.part(whole, at, self._sizes)
            if not sharding.is_sent_by(at) or place.numel() == 0 or self._rank not in (0, rank):
                continue
            own = torch.empty(place.numel(), dtype=dtype)
            if self._rank == rank and part is not None:
                own.copy_(part)
            if self._rank > 0:
                dist.send(own.view(torch.uint8), 0, self._group)
                continue
            if rank > 0:
                dist.recv(own.view(torch.uint8), rank, self._group)
            place.copy_(own.view(place.shape))
        return whole

    def deal(self, name: str, whole: Tensor | None, part: Tensor | None) -> None:
        """See ``TensorParts``."""
        sharding = self._of_tensors[name]
        if self._rank > 0:
            if part is not None and part.numel():
                dist.recv(part.view(torch.uint8), 0, self._group)
            return
        assert whole is not None
        for rank in range(self._sizes.ranks):
            at = self._sizes.coordinate(rank)
            own = sharding.part(whole.view(sharding.shape), at, self._sizes).reshape(-1)
            if at.stage not in sharding.stages or own.numel() == 0:
                continue
            if rank > 0:
                dist.send(own.view(torch.uint8), rank, self._group)
            elif part is not None:
                part.copy_(own)

    def total(self, of_parts: Mapping[str, float]) -> float:
        """See ``TensorParts``."""
        at = self._sizes.coordinate(self._rank)
        own = sum(number for name, number in of_parts.items() if self._of_tensors[name].is_sent_by(at))
        total = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return float(total)


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
            before = found[name].stages if name in found else ()
            found[name] = Sharding(
                **of_tensor | {"shape": tuple(of_tensor["shape"]), "stages": (*before, stage)}
            )
    return found


def sharding_of(tensor: Tensor) -> Sharding:
    """Return how ranks of one stage share a tensor."""
    axes: dict[str, int] = {}
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        for name, placed in zip(names, tensor.placements, strict=True):
            if not placed.is_replicate():
                axes[name] = placed.dim  # type: ignore[attr-defined]
    return Sharding(
        tuple(tensor.shape), axes.get("dp_shard"), axes.get("tp"), is_trained=tensor.requires_grad
    )
