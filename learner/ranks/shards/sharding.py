"""A scoring model cut up over a mesh of ranks, by torch's own engines.

    matrices of layers          tensor parallelism, by transformers' plan for the family
    embedding, head             slices of the vocabulary, where the form of the logits is known
    every layer, and the rest   FSDP2, ``fully_shard``

A stage of a pipeline has some of these (``stages``). A family without a plan that is known here gets FSDP2
alone, over the ranks that tensor parallelism would have had. Sums over ranks are sums: the loss has its
divisors already, so FSDP2's averaging is turned off.
"""

import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.model.scorer import Scorer
from learner.model.token_logprob import VocabularySlice
from learner.ranks.shards.stages import Absent, has_tied_head
from learner.sizing.mesh_sizes import MeshSizes
from node.errors import StartupError

HEADS: Final = 2
"""The axis of heads in what normalises queries and keys: [rows, length, heads, width of a head]."""


def layer_plan(model: PreTrainedModel) -> dict[str, ParallelStyle] | None:
    """Return how the layers' matrices are sliced, by their names in the base model; None: not known."""
    plan = getattr(model.config.get_text_config(), "base_model_tp_plan", None)
    if not plan or model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
        return None
    styles: dict[str, ParallelStyle] = {}
    for name, style in plan.items():
        if style == "colwise":
            styles[name] = ColwiseParallel()
        elif style == "rowwise":
            styles[name] = RowwiseParallel()
        elif style == "replicated_with_grad_allreduce" and name.endswith(("q_norm", "k_norm")):
            styles[name] = SequenceParallel(sequence_dim=HEADS, use_local_output=True)
        else:
            return None
    return styles


def check_slices(model: PreTrainedModel, *, tp: int) -> None:
    """Check that attention can be sliced.

    Raises:
        StartupError: ``tp`` does not divide the heads.
    """
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    for name, count in (("attention", heads), ("key-value", getattr(text, "num_key_value_heads", heads))):
        if count is not None and count % tp:
            raise StartupError(
                f"tp = {tp} does not divide the model's {count} {name} heads",
                fix="Set tp to a divisor of both counts, and dp_shard to make up for it.",
            )


def sliced_tokens(scorer: Scorer, *, tp: int) -> int:
    """Return the tokens of each slice of a whole model's embedding and head; 0: these are not sliced."""
    model = scorer.model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    # A subclass may scale what it looks up, and without a form of the logits the head must be whole.
    if scorer.logit_form is None or type(embedding) is not torch.nn.Embedding:
        return 0
    tokens = len(embedding.weight)
    return 0 if tokens % tp or len(head.weight) != tokens else tokens // tp


def slice_layers(scorer: Scorer, mesh: DeviceMesh, *, tokens: int) -> None:
    """Slice layers, embedding and head over a mesh of one dimension.

    Args:
        tokens: see ``sliced_tokens``.
    """
    model = scorer.model
    plan = layer_plan(model)
    if plan is None:
        raise ValueError(f"{type(model).__name__} has no plan for tensor parallelism that is known here")
    with warnings.catch_warnings():  # of layers that other stages have
        warnings.filterwarnings("ignore", message="Parallelize plan key")
        parallelize_module(model.base_model, mesh, plan, src_data_rank=None)
    if tokens == 0:
        return
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    is_tied = has_tied_head(model)
    for module in (embedding, head):
        if isinstance(module, Absent):
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            if module is head and is_tied and name == "weight":
                module.weight = embedding.weight
                continue
            sliced = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, torch.nn.Parameter(sliced, parameter.requires_grad))
    vocabulary = VocabularySlice(mesh.get_local_rank() * tokens, tokens, GroupReduction(mesh.get_group()))
    if isinstance(embedding, torch.nn.Embedding):
        embedding.forward = partial(_look_up, embedding, vocabulary)  # type: ignore[method-assign]
    scorer.vocabulary = vocabulary


def shard_fully(scorer: Scorer, mesh: DeviceMesh, *, is_trained: bool, offloads: bool) -> None:
    """Shard every layer, then what is left, over a mesh of shards or of replicas and shards.

    A layer is gathered for its forward and its backward pass, what is left (embedding, head) for a whole pass
    where there is a backward pass to come. Gradients are added up in float32 at least.
    """
    wide = torch.promote_types(scorer.master_dtype, torch.float32)
    shard = partial(
        fully_shard,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(reduce_dtype=wide),
        offload_policy=CPUOffloadPolicy() if offloads else OffloadPolicy(),
    )
    layers = [layer for layer in scorer.modules() if isinstance(layer, GradientCheckpointingLayer)]
    for layer in layers:
        shard(layer)
    shard(scorer, reshard_after_forward=not is_trained)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


@dataclass(frozen=True, slots=True, eq=False)
class GroupReduction:
    """Sums and maxima over a process group, in place."""

    group: ProcessGroup

    def add_up(self, values: Tensor) -> None:
        """Replace values by their sum over the ranks."""
        dist.all_reduce(values, group=self.group)

    def take_largest(self, values: Tensor) -> None:
        """Replace values by the largest of the ranks."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)


def shrink(sizes: MeshSizes) -> MeshSizes:
    """Return the mesh of a family without a plan: FSDP2 over all ranks that tensor parallelism asked for."""
    return replace(sizes, dp_shard=sizes.dp_shard * sizes.tp, tp=1)


def _look_up(embedding: torch.nn.Embedding, vocabulary: VocabularySlice, input_ids: Tensor) -> Tensor:
    place, is_here = vocabulary.place(input_ids)
    weight: Tensor = embedding.weight.to_local()  # type: ignore[attr-defined]
    padding = embedding.padding_idx
    if padding is not None:
        padding = padding - vocabulary.first if 0 <= padding - vocabulary.first < vocabulary.tokens else None
    found = torch.nn.functional.embedding(place, weight, padding)
    sum_: Tensor = _SumOverRanks.apply(found * is_here[..., None], vocabulary.ranks)  # type: ignore[no-untyped-call]
    return sum_


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, values: Tensor, ranks: GroupReduction) -> Tensor:
        values = values.clone()
        ranks.add_up(values)
        return values

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        # Every rank goes on from the whole sum, so each has its gradient already.
        return gradient, None
