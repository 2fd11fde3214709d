"""The live words where vLLM computes with them: views of its parameters, by the names of the layout.

    layout    model.layers.0.self_attn.q_proj.weight   ...k_proj.weight   ...v_proj.weight
    vLLM      |------------------ model.layers.0.self_attn.qkv_proj.weight ----------------|

Each of vLLM's fused parameters is the checkpoint's tensors one after the other, so a frame is a few slices.
A version is written in place: parameters never change their address, which CUDA graphs hold. Where devices
share the model, each has some rows or some columns of most tensors, and the whole of the others. On a CPU
vLLM computes with a packed copy of each matrix; ``settle`` packs them again.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import vllm.model_executor.layers.utils as vllm_layers
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from node.weights.format.dtypes import BFLOAT16
from node.weights.format.layout import TensorSpan
from sampler.engines.vllm.fused_experts import (
    expert_weights,
    experts_compute,
    is_expert_weight,
    keep_expert_words,
    settle_experts,
)
from sampler.engines.vllm.model_directory import DeclaredTensors, unusable, verify_files
from sampler.engines.vllm.shards import ParameterWords, Shard

_FUSED: Final[dict[str, Sequence[str]]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Tensors that vLLM's models fuse; ``packed_modules_mapping`` of some leaves out a shared expert's."""
_COMPUTED: Final = 2e-2
"""How far, relative to its length, a layer's output may be from the one computed with its words: bfloat16
kernels differ by less than 1e-2, a layer that computes with other words by about 1."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One of the checkpoint's tensors in a parameter of vLLM's."""

    values: Tensor
    """[rows, columns]"""
    owner: Any
    shared_by: Any
    """The module with ``tp_size`` and ``tp_rank``, where several devices share it."""
    whole_rows: int | None = None
    """Rows of the whole tensor, if not its first dimension."""


class LiveParameters:
    """See ``LiveWords``. vLLM's parameters do not move, so versions are written in place."""

    spares = None

    def __init__(
        self, live: ParameterWords, owners: Iterable[nn.Module], *, elements: Mapping[str, int]
    ) -> None:
        """Look at parameters of ``owners``; ``elements`` says how many of each tensor are here."""
        self.elements = elements
        self.live = live
        self._owners = list(owners)

    def settle(self) -> None:
        for owner in self._owners:
            if hasattr(owner, "cpu_linear"):
                vllm_layers.dispatch_cpu_unquantized_gemm(owner, remove_weight=False)
            settle_experts(owner)


def keep_packed_words() -> None:
    """Keep the matrices that vLLM packs for a CPU, from now on; it throws them away otherwise."""
    keep_expert_words()
    pack: Callable[..., None] = vllm_layers.dispatch_cpu_unquantized_gemm

    def pack_and_keep(layer: nn.Module, remove_weight: bool) -> None:
        pack(layer, remove_weight=False)

    vllm_layers.dispatch_cpu_unquantized_gemm = pack_and_keep


def live_parameters(
    model: nn.Module, declared: DeclaredTensors, *, model_dir: Path, are_changed: bool = False
) -> LiveParameters:
    """Find every tensor of the layout in vLLM's parameters, and verify that they are what the files hold.

    Tied weights are tied again and written from the files, which may hold them under any of their names: vLLM
    loads some names as weights of their own, and leaves the others as they were allocated.

    Args:
        are_changed: Other versions were written since the model was loaded: write the files' words first.
    Raises:
        StartupError: vLLM computes with other tensors, or in another dtype, than the model publishes.
    """
    for tied in declared.names.values():
        _tie(model, tied)
    parts = _parts_of(model)
    shards: dict[str, Shard] = {}
    owners: dict[int, nn.Module] = {}
    for span in declared.layout.tensors:
        names = dict.fromkeys(name for form in declared.forms[span.name] for name in form)
        found = [parts[name] for name in names if name in parts]
        shards[span.name] = _checked(span, found)
        owners |= {id(part.owner): part.owner for part in found}
    _verify_published(model, shards.values())
    weights = LiveParameters(
        ParameterWords(shards, declared.layout),
        owners.values(),
        elements={name: shard.values.numel() for name, shard in shards.items()},
    )
    verify_files(shards, declared, model_dir=model_dir, are_changed=are_changed)
    weights.settle()
    _verify_settling(weights, shards, owners.values())
    return weights


def _tie(model: nn.Module, names: Sequence[str]) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # The head is computed outside CUDA graphs, so its address may change.
    first, *others = sorted(set(names) & parameters.keys(), key=lambda name: "head" in name) or [""]
    for name in others:
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, parameters[first])


def _parts_of(model: Any) -> dict[str, _Part]:
    """Return the tensors that vLLM's parameters are made of, by the checkpoint's names."""
    fused: Mapping[str, Sequence[str]] = _FUSED | getattr(model, "packed_modules_mapping", {})
    parts: dict[str, _Part] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        stem, _, module = path.rpartition(".")
        owner, data = model.get_submodule(path), parameter.data
        if is_expert_weight(owner, leaf) or not data.is_contiguous():
            continue
        if (vocabulary := getattr(owner, "shard_indices", None)) is not None:
            # It is padded to a multiple of 64.
            data = data[: vocabulary.num_org_elements]
        # Where the model publishes them fused too, there is one name for all of it.
        parts[name] = _Part(_as_matrix(data), owner, owner)
        if len(fused.get(module, ())) > 1 and hasattr(owner, "output_sizes"):
            rows = data.split(list(owner.output_partition_sizes))
            parts |= {
                f"{stem}.{part}.{leaf}": _Part(_as_matrix(rows_of_part), owner, owner)
                for part, rows_of_part in zip(fused[module], rows, strict=True)
            }
    for layer in model.modules():
        if isinstance(layer, RoutedExperts):
            for weight in expert_weights(layer):
                part = _Part(weight.words, layer, layer.moe_config, len(weight.words))
                parts |= dict.fromkeys(weight.names, part)
    return parts


def _as_matrix(data: Tensor) -> Tensor:
    return data.view(len(data) if data.ndim else 1, -1)


def _checked(span: TensorSpan, found: Sequence[_Part]) -> Shard:
    """Return the one place that holds a tensor, or this device's share of it."""
    if len({part.values.data_ptr() for part in found}) != 1:
        where = "nowhere" if not found else f"{len(found)} times"
        raise unusable(f"tensor {span.name!r} is {where} among vLLM's parameters, and must be there once")
    part = found[0]
    rows, columns = part.values.shape
    whole_rows = part.whole_rows or (span.shape[0] if span.shape else 1)
    whole_columns = span.elements // whole_rows
    devices, device = getattr(part.shared_by, "tp_size", 1), getattr(part.shared_by, "tp_rank", 0)
    if (vocabulary := getattr(part.owner, "shard_indices", None)) is not None:
        first_row, first_column = vocabulary.org_vocab_start_index, 0
        has_share = columns == whole_columns
    else:
        first_row = device * rows if rows < whole_rows else 0
        first_column = device * columns if columns < whole_columns else 0
        has_share = rows * columns in (span.elements, span.elements // devices)
    if not has_share:
        raise unusable(
            f"tensor {span.name!r} has shape {span.shape}, of which vLLM has {rows} x {columns} on each of "
            f"{devices} devices"
        )
    held = str(part.values.dtype).removeprefix("torch.")
    if held != span.dtype.name and (held, span.dtype) != ("float32", BFLOAT16):
        raise unusable(f"tensor {span.name!r} is published as {span.dtype.name}, vLLM computes with {held}")
    return Shard(part.values, first_row, first_column, whole_columns)


def _verify_published(model: nn.Module, shards: Collection[Shard]) -> None:
    """Verify that each parameter is in the layout, once: no version reaches what vLLM derives from others."""
    published = {shard.values.data_ptr() for shard in shards}
    if len(published) != len(shards):
        raise unusable("vLLM ties weights that the model publishes apart")
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        if not is_expert_weight(model.get_submodule(path), leaf) and parameter.data_ptr() not in published:
            raise unusable(f"vLLM computes with {name!r}, which the model does not publish")


def _verify_settling(
    weights: LiveParameters, shards: Mapping[str, Shard], owners: Iterable[nn.Module]
) -> None:
    """Flip the sign of every word and back, and look each time whether the layers compute with it.

    A copy that vLLM made of a matrix and that no version reaches (a tied head once had one) would be seen in
    no digest.
    """
    for _ in range(2):
        for shard in shards.values():
            if shard.values.is_floating_point():
                shard.values.neg_()
        weights.settle()
        for owner in owners:
            _verify_computed(owner)


@torch.inference_mode()
def _verify_computed(owner: Any) -> None:
    """Verify that a layer computes with its words."""
    if isinstance(owner, RoutedExperts):
        if not experts_compute(owner, tolerance=_COMPUTED):
            raise unusable(f"experts of {owner.layer_name} do not compute with words written to them")
        return
    weight = getattr(owner, "weight", None)
    if weight is None or weight.ndim != 2 or not hasattr(owner, "quant_method"):
        return
    wave = torch.arange(weight.shape[1], device=weight.device, dtype=torch.float32)
    inputs = (wave * 0.7).sin().to(weight.dtype).unsqueeze(0)
    expected = torch.nn.functional.linear(inputs, weight).float()
    error = (owner.quant_method.apply(owner, inputs) - expected).norm()
    if not error <= _COMPUTED * expected.norm():
        raise unusable(
            f"{type(owner).__name__} {tuple(weight.shape)} does not compute with words written to it"
        )
