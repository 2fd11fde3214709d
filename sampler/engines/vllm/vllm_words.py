"""The live words where vLLM computes with them: views of its parameters, by the names of the layout.

    layout    model.layers.0.self_attn.q_proj.weight   ...k_proj.weight   ...v_proj.weight
    vLLM      |------------------ model.layers.0.self_attn.qkv_proj.weight ----------------|

Each of vLLM's fused parameters is the checkpoint's tensors one after the other, so a frame is a few slices.
A version is written in place: parameters never change their address, which CUDA graphs hold. Where devices
share the model, each has some rows or some columns of most tensors, and the whole of the others. On a CPU
vLLM computes with a packed copy of each matrix; ``settle`` packs them again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import vllm.model_executor.layers.utils as vllm_layers
from safetensors import safe_open
from torch import Tensor, nn

from node.errors import StartupError
from node.weights.format.dtypes import BFLOAT16
from node.weights.format.layout import TensorSpan
from node.weights.format.model_files import weight_files
from sampler.engines.vllm.declared_tensors import DeclaredTensors
from sampler.engines.vllm.parameter_words import SHIFT, ParameterWords, Shard

_COMPUTED: Final = 2e-2
"""How far, relative to its length, a layer's output may be from the one computed with its words: bfloat16
kernels differ by less than 1e-2, a layer that computes with other words by about 1."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One of the checkpoint's tensors in a parameter of vLLM's."""

    values: Tensor
    """[rows, columns]"""
    owner: Any


class LiveParameters:
    """See ``LiveWords``. vLLM's parameters do not move, so versions are written in place."""

    spares = None

    def __init__(
        self, live: ParameterWords, owners: Iterable[nn.Module], *, elements: Mapping[str, int]
    ) -> None:
        """Look at parameters of ``owners``; ``elements`` says how many of each tensor are here."""
        self.elements = elements
        self._live = live
        self._packed = [owner for owner in owners if hasattr(owner, "cpu_linear")]

    @property
    def live(self) -> ParameterWords:
        return self._live

    def settle(self) -> None:
        for owner in self._packed:
            vllm_layers.dispatch_cpu_unquantized_gemm(owner, remove_weight=False)


def keep_packed_words() -> None:
    """Keep the matrices that vLLM packs for a CPU, from now on; it throws them away otherwise."""
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
    for names in declared.names.values():
        _tie(model, names)
    parts = _parts_of(model)
    shards: dict[str, Shard] = {}
    owners: dict[int, nn.Module] = {}
    for span in declared.layout.tensors:
        found = [parts[name] for name in declared.names[span.name] if name in parts]
        shards[span.name] = _checked(span, found)
        owners |= {id(part.owner): part.owner for part in found}
    if len({shard.values.data_ptr() for shard in shards.values()}) != len(shards):
        raise _unusable("vLLM ties weights that the model publishes apart")
    weights = LiveParameters(
        ParameterWords(shards, declared.layout),
        owners.values(),
        elements={name: shard.values.numel() for name, shard in shards.items()},
    )
    _verify_files(shards, declared, model_dir=model_dir, are_changed=are_changed)
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
    fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    parts: dict[str, _Part] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        stem, _, module = path.rpartition(".")
        owner, data = model.get_submodule(path), parameter.data
        # Where the model publishes them fused too, there is one name for all of it.
        if len(fused.get(module, ())) > 1 and hasattr(owner, "output_sizes"):
            rows = data.split(list(owner.output_partition_sizes))
            parts |= {
                f"{stem}.{part}.{leaf}": _Part(_as_matrix(rows_of_part), owner)
                for part, rows_of_part in zip(fused[module], rows, strict=True)
            }
        else:
            if (vocabulary := getattr(owner, "shard_indices", None)) is not None:
                # It is padded to a multiple of 64.
                data = data[: vocabulary.num_org_elements]
            parts[name] = _Part(_as_matrix(data), owner)
    return parts


def _as_matrix(data: Tensor) -> Tensor:
    return data.view(len(data) if data.ndim else 1, -1)


def _checked(span: TensorSpan, found: Sequence[_Part]) -> Shard:
    """Return the one place that holds a tensor, or this device's share of it."""
    if len({part.values.data_ptr() for part in found}) != 1:
        where = "nowhere" if not found else f"{len(found)} times"
        raise _unusable(f"tensor {span.name!r} is {where} among vLLM's parameters, and must be there once")
    values, owner = found[0].values, found[0].owner
    rows, columns = values.shape
    whole_rows = span.shape[0] if span.shape else 1
    whole_columns = span.elements // whole_rows
    devices, device = getattr(owner, "tp_size", 1), getattr(owner, "tp_rank", 0)
    if (vocabulary := getattr(owner, "shard_indices", None)) is not None:
        shard = Shard(values, vocabulary.org_vocab_start_index, 0)
        has_share = columns == whole_columns
    else:
        shard = Shard(
            values,
            device * rows if rows < whole_rows else 0,
            device * columns if columns < whole_columns else 0,
        )
        has_share = rows * columns in (span.elements, span.elements // devices)
    if not has_share:
        raise _unusable(
            f"tensor {span.name!r} has shape {span.shape}, of which vLLM has {rows} x {columns} on each of "
            f"{devices} devices"
        )
    held = str(values.dtype).removeprefix("torch.")
    if held != span.dtype.name and (held, span.dtype) != ("float32", BFLOAT16):
        raise _unusable(f"tensor {span.name!r} is published as {span.dtype.name}, vLLM computes with {held}")
    return shard


def _verify_files(
    shards: Mapping[str, Shard], declared: DeclaredTensors, *, model_dir: Path, are_changed: bool
) -> None:
    canonical = {name: first for first, names in declared.names.items() for name in names}
    missing = set(shards)
    for path in weight_files(model_dir):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name not in canonical:
                    continue
                first = canonical[name]
                stored, held = shards[first].of(file.get_tensor(name)), shards[first].values
                if (are_changed or len(declared.names[first]) > 1) and first in missing:
                    held.copy_(stored)
                if not _has_bits(held, stored):
                    raise _unusable(f"tensor {name!r} as loaded by vLLM differs from the one in {path.name}")
                missing.discard(first)
    if missing:
        raise _unusable(f"the model's files lack {len(missing)} tensors, {min(missing)!r} among them")


def _has_bits(held: Tensor, stored: Tensor) -> bool:
    if held.dtype is torch.float32 and stored.dtype is torch.bfloat16:
        bits = stored.contiguous().view(torch.int16).to(held.device).to(torch.int32) << SHIFT
        return torch.equal(held.view(torch.int32), bits)
    return held.dtype is stored.dtype and torch.equal(
        held.view(torch.uint8), stored.contiguous().view(torch.uint8).to(held.device)
    )


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
    weight = getattr(owner, "weight", None)
    if weight is None or weight.ndim != 2 or not hasattr(owner, "quant_method"):
        return
    wave = torch.arange(weight.shape[1], device=weight.device, dtype=torch.float32)
    inputs = (wave * 0.7).sin().to(weight.dtype).unsqueeze(0)
    expected = torch.nn.functional.linear(inputs, weight).float()
    error = (owner.quant_method.apply(owner, inputs) - expected).norm()
    if not error <= _COMPUTED * expected.norm():
        raise _unusable(
            f"{type(owner).__name__} {tuple(weight.shape)} does not compute with words written to it"
        )


def _unusable(what: str) -> StartupError:
    return StartupError(f"vLLM cannot serve this model: {what}", fix="Set sampler.engine = 'torch'.")
