"""One of several ranks: the mesh it is in, and what it does together with the others in a step.

Every sum over ranks is of exact zeros and one rank's values, or of parts of a gradient, so that the layout
changes results by the rounding of sums alone.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from learner.model.rank_exchanges import Instruction
from learner.model.scorer import Scorer
from learner.model.step_rows import StepRows
from learner.ranks.errors import RankLostError
from learner.ranks.instruction_stream import InstructionStream
from learner.ranks.shards.pipeline import MICRO_BATCHES_A_STAGE, Pipeline, TiedEmbedding
from learner.ranks.shards.sharding import (
    check_slices,
    layer_plan,
    shard_fully,
    shrink,
    slice_layers,
    sliced_tokens,
)
from learner.ranks.shards.stages import check_stages, has_tied_head, keep_stage
from learner.ranks.words.dealt_words import DealtWords
from learner.ranks.words.frame_work import FrameWork
from learner.ranks.words.sharded_words import ShardedWords
from learner.ranks.words.tensor_shards import Sharding, TensorShards
from learner.sizing.mesh_sizes import DIMENSIONS, MeshSizes
from node.weights.format.layout import Layout

logger = logging.getLogger(__name__)

_EXCHANGE: Final = re.compile("gloo|nccl|connection|socket|timed out", re.IGNORECASE)
"""Words in torch's own errors of a failed exchange; most are plain RuntimeErrors."""

Diagnose = Callable[[], str]
"""Returns which other ranks are known to have ended or stopped, and how; empty where none is."""


class RankGroup:
    """The ranks of a learner, seen from one of them; the process group is there already."""

    is_shared: Final = True

    def __init__(
        self,
        sizes: MeshSizes,
        *,
        device_type: str,
        instructions: InstructionStream | None = None,
        diagnose: Diagnose = lambda: "",
        coding_threads: int = 1,
        offloads: bool = False,
        limit_s: float | None = None,
    ) -> None:
        """Lay a mesh over all ranks; every rank does.

        Args:
            instructions: by which the first rank tells the others what to do; None: they do the same anyway.
            coding_threads: that code this rank's frames of a version.
            offloads: keep shards in the host's memory.
            limit_s: longest wait for other ranks in a step, a version's frames or a checkpoint; None: torch's
                own, half an hour with gloo.
        """
        self.rank: int = dist.get_rank()
        self.sizes = sizes
        self._device_type = device_type
        device = f"cuda:{torch.cuda.current_device()}" if device_type == "cuda" else device_type
        self.device = torch.device(device)
        """The device that this rank computes on."""
        self._limit = None if limit_s is None else timedelta(seconds=limit_s)
        self._offloads = offloads and device_type != "cpu"
        if offloads and not self._offloads:
            logger.warning("learner.offload changes nothing on a CPU: shards are in the host's memory anyway")
        self._instructions = instructions if self.rank == 0 else None
        self._diagnose = diagnose
        self._coding_threads = coding_threads
        self._words_stream = InstructionStream(limit_s=limit_s)
        self.saves = InstructionStream(limit_s=limit_s)
        """Instructions to save."""
        self._words: ShardedWords | None = None
        self._shardings: Mapping[str, Sharding] = {}
        self._mesh = self._meshed(sizes)
        self._tied: list[TiedEmbedding] = []

    def _meshed(self, sizes: MeshSizes) -> DeviceMesh:
        self._at = sizes.coordinate(self.rank)
        grid = torch.arange(sizes.ranks).view(sizes.shape)
        # The mesh's own groups would wait for torch's half an hour, whatever the limit of all ranks is.
        # Each of gloo's has a thread that wakes a hundred times a second: of one rank, one group is enough.
        alone = self._group_of(grid.view(-1, 1))
        groups = [
            alone if size == 1 else self._group_of(grid.movedim(axis, -1))
            for axis, size in enumerate(grid.shape)
        ]
        self._scored = self._group_of(grid.movedim(-1, 0).flatten(1))
        self._ends = self._group_of(grid[[0, -1]].movedim(0, -1)) if sizes.pp > 1 else None
        return DeviceMesh.from_group(groups, self._device_type, grid, mesh_dim_names=DIMENSIONS)

    def _group_of(self, ranks: Tensor) -> ProcessGroup:
        """Make a group of each row, in the last dimension; return this rank's."""
        rows = ranks.reshape(-1, ranks.shape[-1]).tolist()
        made = dist.new_subgroups_by_enumeration(rows, timeout=self._limit)  # type: ignore[no-untyped-call]
        group: ProcessGroup = made[0]
        return group

    @property
    def _has_head(self) -> bool:
        return self._at.stage == self.sizes.pp - 1

    def shard(self, scorer: Scorer) -> Pipeline | None:
        """Keep this rank's part of a model, in place; return what runs it, if that is a stage of a pipeline.

        Raises:
            StartupError: tensor parallelism cannot divide it, or it cannot be cut into stages.
        """
        if self.sizes.tp > 1 and layer_plan(scorer.model) is None:
            wanted, self.sizes = self.sizes, shrink(self.sizes)
            self._mesh = self._meshed(self.sizes)
            logger.warning(
                "no plan for tensor parallelism of this model: FSDP2 alone",
                extra={"model": type(scorer.model).__name__, "asked": str(wanted), "mesh": str(self.sizes)},
            )
        tp, pp = self.sizes.tp, self.sizes.pp
        is_tied, tokens = has_tied_head(scorer.model), sliced_tokens(scorer, tp=tp)
        if tp > 1:
            check_slices(scorer.model, tp=tp)
        if pp > 1:
            check_stages(scorer.model, stages=pp)
            keep_stage(scorer.model, self._at.stage, stages=pp)
            scorer.has_head = self._has_head
        if tp > 1:
            slice_layers(scorer, self._mesh["tp"], tokens=tokens)
        is_trained = any(parameter.requires_grad for parameter in scorer.parameters())
        has_replicas = self.sizes.dp_replicate > 1
        rows = self._mesh["dp_replicate", "dp_shard"] if has_replicas else self._mesh["dp_shard"]
        # Over a mesh of one too: the optimizer takes no mixture of what is sharded and what is not.
        shard_fully(scorer, rows, is_trained=is_trained, offloads=self._offloads)
        if pp == 1:
            return None
        tied = None
        if is_tied and is_trained and self._ends is not None:
            weight = scorer.model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
            tied = TiedEmbedding(weight, self._ends)
            self._tied.append(tied)
        return Pipeline(
            scorer,
            self._at.stage,
            stages=pp,
            group=self._mesh.get_group("pp"),
            tied=tied,
            device=self.device,
        )

    def tell(self, instruction: Callable[[], Instruction]) -> None:
        """Tell the other ranks to do what the first one does next."""
        if self._instructions is not None:
            with self.failures_named():
                self._instructions.send(instruction())

    @contextmanager
    def failures_named(self) -> Iterator[None]:
        """Raise a failed exchange as an error that says which rank is gone.

        Raises:
            RankLostError: in place of what torch raises.
        """
        try:
            yield
        except (dist.DistError, RuntimeError) as error:
            if not _is_of_an_exchange(error):
                raise
            who = self._diagnose() or f"another rank does not answer rank {self.rank}: {error}"
            raise RankLostError(
                f"{who}. All ranks end; start them again: a learner goes on with the step that was lost"
            ) from error

    def words(self, tensors: Mapping[str, Tensor], layout: Layout) -> ShardedWords:
        """Return what reads a version's words off the masters of all ranks, on the first."""
        masters = DealtWords(tensors, layout, sizes=self.sizes, group=self._words_stream.exchanges)
        self._shardings = masters.shardings
        work = FrameWork(masters, threads=self._coding_threads)
        self._words = ShardedWords(work, self._words_stream, failures_named=self.failures_named)
        return self._words

    def parts(self, _: Mapping[str, Tensor]) -> TensorShards:
        """See ``Ranks``; in the thread of steps, where nothing is saved."""
        return TensorShards(self._shardings, sizes=self.sizes, group=self.saves.exchanges)

    def end(self, *, limit_s: float) -> None:
        """Tell the other ranks that nothing comes any more: the first one does, once it has done all else.

        Args:
            limit_s: longest wait for them to take each of these instructions.
        Raises:
            RuntimeError: another rank did not take one, or is gone.
        """
        if self._instructions is None:
            return
        if self._words is not None:
            self._words.end(limit_s=limit_s)
        for stream in (self.saves, self._instructions):
            stream.send(Instruction("end", {}), limit_s=limit_s)

    def follow_writes(self, optimizer: torch.optim.Optimizer) -> None:
        """Let no rank write before the first; call it there after adding the hook that waits for readers."""

        def wait_for_all(*_: object) -> None:
            dist.barrier()

        optimizer.register_step_pre_hook(wait_for_all)

    @contextmanager
    def saving(self, directory: Path, part: str, *, copy: int) -> Iterator[ProcessGroup]:
        """Tell the other ranks to save their shards of one part of that copy meanwhile; yield all ranks.

        Raises:
            RankLostError: one of them is gone, or does not answer.
        """
        with self.failures_named():
            self.saves.send(Instruction("save", {"directory": str(directory), "part": part, "copy": copy}))
            yield self.saves.exchanges

    @property
    def share(self) -> int:
        """See ``Ranks``."""
        return self.sizes.share(self.rank)

    def share_out(self, rows: StepRows, *, budget_tokens: int) -> list[list[list[int]]]:
        """Return the micro-batches of every share: as many in each, so some may be empty."""
        parts = MICRO_BATCHES_A_STAGE * self.sizes.pp if self.sizes.pp > 1 else 1
        return rows.share_out(shares=self.sizes.shares, budget_tokens=budget_tokens, parts=parts)

    def complete(self, logprob: Tensor, places: Tensor) -> None:
        """Add the other ranks' logprobs to a batch's, [n, t]; ``places`` are this rank's own, flattened."""
        known, flat = torch.zeros_like(logprob).view(-1), logprob.view(-1)
        if self._has_head:
            known[places] = flat[places]
        dist.all_reduce(known, group=self._scored)
        flat.copy_(known)

    def local(self, tensor: Tensor) -> Tensor:
        """Return the part of a parameter or gradient that this rank holds; shares its memory."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    @torch.no_grad()
    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the norm of the whole gradient: the root of the sum over ranks of each part's squares.

        A part that several ranks hold counts once: the sum goes over the dimensions that divide it, and over
        the stages, the first of which speaks for a tied embedding.
        """
        counted = self._tied if self._at.stage > 0 else ()
        squares: dict[tuple[str, ...], Tensor] = {}
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None or any(one.parameter is parameter for one in counted):
                continue
            divided: tuple[str, ...] = ()
            if isinstance(gradient, DTensor):
                names = gradient.device_mesh.mesh_dim_names or ()
                divided = tuple(
                    name
                    for name, placed in zip(names, gradient.placements, strict=True)
                    if not placed.is_replicate()
                )
            square = torch.linalg.vector_norm(self.local(gradient)).square()
            squares[divided] = squares[divided] + square if divided in squares else square
        for divided, square in squares.items():
            for name in divided:
                dist.all_reduce(square, group=self._mesh.get_group(name))
        total = torch.stack(list(squares.values())).sum()
        if self.sizes.pp > 1:
            dist.all_reduce(total, group=self._mesh.get_group("pp"))
        return total.sqrt()

    def agreed(self, numbers: Tensor) -> Tensor:
        """Return what the first rank has: decisions must not hang on the last bit of a rank's own sums."""
        dist.broadcast(numbers, src=0)
        return numbers

    def all_true(self, is_true: bool) -> bool:
        """Return whether it holds on every rank."""
        number = torch.tensor(float(is_true), device=self._device_type)
        dist.all_reduce(number, op=dist.ReduceOp.MIN)
        return bool(number)


def _is_of_an_exchange(error: BaseException | None) -> bool:
    """Whether an error is of an exchange, or was raised from one: pipelining wraps what a stage raises."""
    while error is not None:
        if isinstance(error, dist.DistError) or _EXCHANGE.search(str(error)):
            return True
        error = error.__cause__
    return False
