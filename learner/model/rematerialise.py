"""Layers that are computed again for their backward pass, in part or whole: gradient checkpointing."""

import functools

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.config import Rematerialise
from learner.model.pack_attention import kernel_operations


def rematerialise_layers(model: PreTrainedModel, what: Rematerialise) -> None:
    """Make every layer keep less for its backward pass; ``what`` is not "none"."""
    again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if what == "selective":
        again.keywords["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, _kept_results()
        )
    # transformers checkpoints in training mode only, which would turn dropout on.
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = functools.partial(again, layer.forward)


def _kept_results() -> list[torch._ops.OpOverload]:
    """Return the operations whose results are kept: products and attention, which are most of the work."""
    aten = torch.ops.aten
    return [
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten._grouped_mm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        *kernel_operations(),
    ]
