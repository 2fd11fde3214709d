"""Mixtures of experts in vLLM: where their words are, and the copies that it computes with.

    files     ...experts.0.gate_proj.weight   ...experts.0.up_proj.weight     ...experts.0.down_proj.weight
    layout    ...experts.gate_up_proj  [experts, 2 intermediate, hidden]      ...experts.down_proj
    vLLM      w13_weight                                                      w2_weight

Where devices share the model, each has a part of every expert: the same rows of gate and of up, and the same
columns of down. On a CPU vLLM replaces both parameters by what its kernel reads, permuted and padded. The
words are kept beside them, and ``settle_experts`` permutes them again.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from sampler.engines.vllm.model_directory import unusable

_WEIGHTS: Final = ("w13_weight", "w2_weight")
_IN_ORDER: Final = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.CPU)
"""Kernels that compute with the words in the checkpoint's order, or whose words are kept here."""
_PROBE: Final = 8.0
"""Amplitude of what experts are tried on. Small inputs would hide the sign of gate and up: their product has
none where the activation is linear."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeight:
    """A parameter of experts."""

    names: tuple[str, str]
    """Names of the tensor in the layout, and of the first in a checkpoint that has experts apart."""
    words: Tensor
    """[rows, columns], such that devices share columns."""


def keep_expert_words() -> None:
    """Keep the words of experts that vLLM permutes for a CPU, from now on; it throws them away otherwise."""
    permute = CPUUnquantizedExperts.process_weights_after_loading

    def permute_and_keep(kernel: Any, layer: nn.Module) -> None:
        words = {name: getattr(layer, name).data for name in _WEIGHTS}
        permute(kernel, layer)
        vars(layer)["sampler_words"] = words

    CPUUnquantizedExperts.process_weights_after_loading = permute_and_keep


def is_expert_weight(owner: nn.Module, leaf: str) -> bool:
    """Return whether a parameter is one of ``expert_weights``."""
    return isinstance(owner, RoutedExperts) and leaf in _WEIGHTS


def expert_weights(layer: Any) -> Iterator[ExpertWeight]:
    """Yield the weights of experts; StartupError if vLLM holds others or in another order."""
    if layer.use_ep:
        raise unusable("each device has whole experts; leave expert parallelism out")
    if (backend := layer.quant_method.unquantized_backend) not in _IN_ORDER:
        raise unusable(f"the {backend.value} kernels permute its experts; set moe_backend to triton")
    w13, w2 = _words(layer)
    path, gate, down = layer.layer_name, layer.ckpt_gate_proj_name, layer.ckpt_down_proj_name
    yield ExpertWeight((f"{path}.gate_up_proj", f"{path}.0.{gate}.weight"), w13.view(2 * len(w13), -1))
    yield ExpertWeight((f"{path}.down_proj", f"{path}.0.{down}.weight"), w2.view(-1, w2.shape[2]))


def settle_experts(layer: Any) -> None:
    """Compute with the words that were kept, in the memory that was computed with before."""
    if not hasattr(layer, "sampler_words"):
        return
    computed = {name: getattr(layer, name) for name in _WEIGHTS}
    for name, words in layer.sampler_words.items():
        setattr(layer, name, nn.Parameter(words, requires_grad=False))
    layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)
    for name, parameter in computed.items():
        parameter.data.copy_(getattr(layer, name))
        setattr(layer, name, parameter)


@torch.inference_mode()
def experts_compute(layer: Any, *, tolerance: float) -> bool:
    """Return whether each expert computes with its words: whether its output for one token is theirs.

    Args:
        tolerance: Of the difference, relative to the output's length.
    """
    w13, w2 = _words(layer)
    experts = torch.arange(len(w13), device=w13.device)
    wave = torch.arange(w13.shape[2], device=w13.device, dtype=torch.float32)
    inputs = (_PROBE * (wave * 0.7).sin()).to(w13.dtype).expand(len(experts), -1).contiguous()
    computed = layer.quant_method.apply(
        layer=layer,
        x=inputs.clone(),
        topk_weights=torch.ones(len(experts), 1, device=w13.device),
        topk_ids=experts[:, None].to(torch.int32),
        shared_experts=None,
        shared_experts_input=None,
    )
    for expert, row in enumerate(inputs):
        gate_up = (w13[expert] @ row).unsqueeze(0)
        inner = gate_up.new_empty(1, w2.shape[2])
        apply_moe_activation(layer.activation, inner, gate_up)
        expected = (w2[expert] @ inner[0]).float()
        if not (computed[expert] - expected).norm() <= tolerance * expected.norm():
            return False
    return True


def _words(layer: Any) -> tuple[Tensor, Tensor]:
    kept: Mapping[str, Tensor] = getattr(layer, "sampler_words", {})
    w13, w2 = (kept.get(name, getattr(layer, name).data) for name in _WEIGHTS)
    return w13, w2
