"""``Ranks``: the exchanges between a learner's ranks in a step, as its code asks for them.

Every rank runs the same step on the same groups. It scores its own rows, holds its own part of parameters,
gradients and moments, and evaluates the loss over the whole batch: a few floats a token travel. One
rank has everything, and nothing to exchange; ``learner.ranks`` has the other implementation.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from learner.masters.master_words import MasterWords, PolicyWords
from learner.model.step_rows import StepRows
from node.weights.format.layout import Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from learner.model.model import Passes
    from learner.model.scorer import Scorer


@dataclass(frozen=True, slots=True, eq=False)
class Instruction:
    """Something that the first rank has the others do, and what it takes; nothing is pickled."""

    name: str
    values: Mapping[str, Any]
    blobs: Sequence[bytes] = ()

    def to_bytes(self) -> bytes:
        """Return it encoded."""
        told = {"name": self.name, "values": self.values, "blobs": [len(blob) for blob in self.blobs]}
        header = json.dumps(told).encode()
        return b"".join([len(header).to_bytes(8, "little"), header, *self.blobs])

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return what ``to_bytes`` encoded."""
        start = 8 + int.from_bytes(data[:8], "little")
        told = json.loads(data[8:start])
        ends = itertools.accumulate(told["blobs"], initial=start)
        return cls(told["name"], told["values"], [data[a:b] for a, b in itertools.pairwise(ends)])


class TensorParts(Protocol):
    """Parts of tensors that ranks hold, and whole tensors on the first rank, one at a time, on the CPU."""

    @property
    def trained(self) -> Mapping[str, torch.Size]:
        """Whole shapes of the trained tensors of all ranks, by name, sorted by the bytes of the name."""
        ...

    def gather(self, name: str, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return a whole tensor on the first rank, made of the parts; flat parts, None of those not held."""
        ...

    def deal(self, name: str, whole: Tensor | None, part: Tensor | None) -> None:
        """Fill each rank's flat part, on the CPU, from the first rank's whole tensor of the same dtype."""
        ...

    def total(self, of_parts: Mapping[str, float]) -> float:
        """Return the sum, over ranks, of a number for each part; a part that several hold counts once."""
        ...


class WholeTensors:
    """The parts of one process: all of each tensor."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.trained = {name: tensor.shape for name, tensor in tensors.items() if tensor.requires_grad}
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}

    def gather(self, name: str, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the part in its shape."""
        assert part is not None
        return part.to("cpu", dtype).view(self._shapes[name])

    def deal(self, name: str, whole: Tensor | None, part: Tensor | None) -> None:
        """Copy it."""
        assert whole is not None
        assert part is not None
        part.copy_(whole.view(-1))

    def total(self, of_parts: Mapping[str, float]) -> float:
        """Return the sum."""
        return sum(of_parts.values())


class Ranks(Protocol):
    """The ranks that share a model, seen from one of them."""

    @property
    def is_shared(self) -> bool:
        """Whether there are several."""
        ...

    @property
    def device(self) -> torch.device | None:
        """Device that ranks compute on, if parameters may be elsewhere; None: where the parameters are."""
        ...

    @property
    def share(self) -> int:
        """The share of a step's rows that this rank works on."""
        ...

    def shard(self, scorer: "Scorer") -> "Passes | None":
        """Keep this rank's part of a model, in place; return what runs it, if it is one stage of several."""
        ...

    def tell(self, instruction: Callable[[], Instruction]) -> None:
        """Tell the other ranks to do what this one, the first, does next; the others tell nobody."""
        ...

    def failures_named(self) -> AbstractContextManager[None]:
        """Raise what other ranks' failures lead to here as one error that names them."""
        ...

    def words(self, tensors: Mapping[str, Tensor], layout: Layout) -> PolicyWords:
        """Return what reads a version's words off the masters of all ranks, on the first."""
        ...

    def parts(self, tensors: Mapping[str, Tensor]) -> TensorParts:
        """Return what gathers and deals the tensors whose words are read, a whole one at a time."""
        ...

    def follow_writes(self, optimizer: Optimizer) -> None:
        """Let no rank write its masters before the first one does, whose readers may still be at work."""
        ...

    def saving(
        self, directory: Path, part: str, *, copy: int
    ) -> "AbstractContextManager[ProcessGroup | None]":
        """Tell the other ranks to save their shards of a part of that copy; yield all that do."""
        ...

    def share_out(self, rows: StepRows, *, budget_tokens: int) -> list[list[list[int]]]:
        """Return the micro-batches of every share of a step's rows: as many in each, some may be empty."""
        ...

    def complete(self, logprob: Tensor, places: Tensor) -> None:
        """Add the other ranks' logprobs to a batch's, [n, t]; ``places`` are this rank's own, flattened."""
        ...

    def local(self, tensor: Tensor) -> Tensor:
        """Return the part of a parameter or gradient that this rank holds; shares its memory."""
        ...

    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the norm of the whole gradient."""
        ...

    def agreed(self, numbers: Tensor) -> Tensor:
        """Return what the first rank has: decisions must not hang on the last bit of a rank's own sums."""
        ...

    def all_true(self, is_true: bool) -> bool:
        """Return whether it holds on every rank."""
        ...


class OneRank:
    """A learner that is one process."""

    is_shared: Final = False
    device: Final = None
    share: Final = 0

    def shard(self, scorer: "Scorer") -> None:
        """Keep all of it."""

    def tell(self, instruction: Callable[[], Instruction]) -> None:
        """Tell nobody."""

    def failures_named(self) -> AbstractContextManager[None]:
        """Do nothing: there are no others."""
        return nullcontext()

    def words(self, tensors: Mapping[str, Tensor], layout: Layout) -> MasterWords:
        """Return what reads a version's words off the masters."""
        return MasterWords(tensors, layout)

    def parts(self, tensors: Mapping[str, Tensor]) -> WholeTensors:
        """Return what has all of each tensor."""
        return WholeTensors(tensors)

    def follow_writes(self, optimizer: Optimizer) -> None:
        """Follow nobody."""

    def saving(self, directory: Path, part: str, *, copy: int) -> AbstractContextManager[None]:
        """Yield None: one process saves all of it."""
        return nullcontext()

    def share_out(self, rows: StepRows, *, budget_tokens: int) -> list[list[list[int]]]:
        """Return all micro-batches, as one share."""
        return rows.share_out(shares=1, budget_tokens=budget_tokens)

    def complete(self, logprob: Tensor, places: Tensor) -> None:
        """Add nothing."""

    def local(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the norm of the gradient."""
        return get_total_norm([p.grad for p in parameters if p.grad is not None])

    def agreed(self, numbers: Tensor) -> Tensor:
        """Return the numbers."""
        return numbers

    def all_true(self, is_true: bool) -> bool:
        """Return it."""
        return is_true


ONE_RANK: Final = OneRank()
