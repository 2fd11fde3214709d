"""How many ranks there are, and what each of them shares with which others; pure.

rank = ((stage * dp_replicate + replica) * dp_shard + shard) * tp + slice

pp             stages, each a run of the layers, which pass hidden states on (pipeline parallelism)
dp_replicate   copies of the model, each with its share of the rows
dp_shard       parts of each copy's parameters, gradients and moments (FSDP2), each with its share of rows
tp             slices of every layer's matrices (tensor parallelism), which work on the same rows
"""

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

DIMENSIONS: Final = ("pp", "dp_replicate", "dp_shard", "tp")


class Coordinate(NamedTuple):
    """A rank's place in the mesh."""

    replica: int
    shard: int
    slice: int
    stage: int = 0


@dataclass(frozen=True, slots=True)
class MeshSizes:
    """The sizes of a mesh of ranks, each at least 1."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def ranks(self) -> int:
        """Processes."""
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """In the order of ``DIMENSIONS``."""
        return self.pp, self.dp_replicate, self.dp_shard, self.tp

    @property
    def shares(self) -> int:
        """Shares of the rows: ranks that differ by stage or slice alone work on the same one."""
        return self.dp_replicate * self.dp_shard

    def coordinate(self, rank: int) -> Coordinate:
        """Return where a rank is."""
        rest, slice_ = divmod(rank, self.tp)
        rest, shard = divmod(rest, self.dp_shard)
        stage, replica = divmod(rest, self.dp_replicate)
        return Coordinate(replica, shard, slice_, stage)

    def share(self, rank: int) -> int:
        """Return which share of the rows a rank works on."""
        at = self.coordinate(rank)
        return at.replica * self.dp_shard + at.shard

    def __str__(self) -> str:
        """Return the sizes as the configuration names them."""
        return ", ".join(f"{name} {size}" for name, size in zip(DIMENSIONS, self.shape, strict=True))
