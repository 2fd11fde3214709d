"""The live words where vLLM computes with them: views of its parameters, by the names of the layout.

    layout    model.layers.0.self_attn.q_proj.weight   ...k_proj.weight   ...v_proj.weight
    vLLM      |------------------ model.layers.0.self_attn.qkv_proj.weight ----------------|

Each of vLLM's fused parameters is the checkpoint's tensors one after the other, so a frame is a few
contiguous slices, and a version is written in place: parameters never change their address, which CUDA graphs
hold. On a CPU vLLM computes with a packed copy of each matrix; ``settle`` packs them again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import vllm.model_executor.layers.utils as vllm_layers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from node.errors import StartupError
from node.weights.format.digests import Words
from node.weights.format.dtypes import BFLOAT16
from node.weights.format.layout import FrameSpan, Layout, TensorSpan
from node.weights.format.model_files import StoredDtypes, weight_files
from node.weights.format.model_tensors import canonical_tensors, tensor_specs

_SHIFT: Final = 16
"""bfloat16 is the upper half of float32. Only integers are shifted: float conversions may flush denormals."""

_COMPUTED: Final = 2e-2
"""How far, relative to its length, a layer's output may be from the one computed with its words: bfloat16
kernels differ by less than 1e-2, a layer that computes with other words by about 1."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One of the checkpoint's tensors in a parameter of vLLM's."""

    flat: Tensor
    owner: nn.Module


class ParameterWords:
    """See ``ModelWords``."""

    def __init__(self, flat: Mapping[str, Tensor], layout: Layout) -> None:
        """Look at the words in ``flat``: each tensor of the layout, by name, as one dimension."""
        self._flat = flat
        self._layout = layout
        self._numbers = {frame.start_word: number for number, frame in enumerate(layout.frames)}

    def read(self, frame: FrameSpan) -> Words:
        words = np.empty(frame.words, np.uint16)
        halves = torch.from_numpy(words.view(np.int16))
        for part, place, is_wide in self._parts(frame):
            if is_wide:
                bits = part.view(torch.int32)
                # The lower half is zero. A bit that flips there changes the word, so the damage is found.
                halves[place] = (bits >> _SHIFT ^ bits).to(torch.int16)
            else:
                halves[place] = part.view(torch.int16)
        return words

    def write(self, frame: FrameSpan, words: Words) -> None:
        # torch refuses views of read-only memory.
        halves = torch.from_numpy((words if words.flags.writeable else words.copy()).view(np.int16))
        for part, place, is_wide in self._parts(frame):
            if is_wide:
                part.view(torch.int32).copy_(halves[place]).bitwise_left_shift_(_SHIFT)
            else:
                part.view(torch.int16).copy_(halves[place])

    def memory(self, frame: FrameSpan) -> Words | None:
        return None

    def _parts(self, frame: FrameSpan) -> Iterator[tuple[Tensor, slice, bool]]:
        """Yield the parts of a frame, where they lie in it, and whether they are bfloat16 held as float32."""
        for overlap in self._layout.overlaps(self._numbers[frame.start_word]):
            flat = self._flat[overlap.tensor.name]
            is_wide = overlap.tensor.dtype is BFLOAT16 and flat.dtype is torch.float32
            # An element that is not wide has as many words as bytes / 2.
            halves = flat if is_wide else flat.view(torch.int16)
            part = halves[overlap.tensor_word : overlap.tensor_word + overlap.words]
            yield part, slice(overlap.frame_word, overlap.frame_word + overlap.words), is_wide


class LiveParameters:
    """See ``LiveWords``. vLLM's parameters do not move, so versions are written in place."""

    spares = None

    def __init__(self, live: ParameterWords, owners: Iterable[nn.Module]) -> None:
        self._live = live
        self._packed = [owner for owner in owners if hasattr(owner, "cpu_linear")]

    @property
    def live(self) -> ParameterWords:
        return self._live

    def settle(self) -> None:
        for owner in self._packed:
            vllm_layers.dispatch_cpu_unquantized_gemm(owner, remove_weight=False)


@contextmanager
def words_kept() -> Iterator[None]:
    """Let vLLM keep the matrices that it packs for a CPU; it throws them away otherwise."""
    pack: Callable[..., None] = vllm_layers.dispatch_cpu_unquantized_gemm

    def pack_and_keep(layer: nn.Module, remove_weight: bool) -> None:
        pack(layer, remove_weight=False)

    vllm_layers.dispatch_cpu_unquantized_gemm = pack_and_keep
    try:
        yield
    finally:
        vllm_layers.dispatch_cpu_unquantized_gemm = pack


@dataclass(frozen=True, slots=True, eq=False)
class DeclaredTensors:
    """What a model directory publishes.

    Attributes:
        names: Name in the layout -> every name that shares its storage.
    """

    layout: Layout
    names: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, model_dir: Path) -> "DeclaredTensors":
        """Read them from the configuration and the headers of the files, as the learner derives them.

        Raises:
            OSError, ValueError: the directory holds no such model.
        """
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        model.tie_weights()
        state = {name: _Declared(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
        same: dict[int, list[str]] = {}
        for name, tensor in state.items():
            same.setdefault(tensor.data_ptr(), []).append(name)
        names = {name: same[tensor.data_ptr()] for name, tensor in canonical_tensors(state).items()}
        return cls(Layout.of(tensor_specs(state, StoredDtypes.of(model_dir))), names)


class _Declared:
    """A tensor without memory. On "meta" every address is 0, but tied weights are one object."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self._tensor = tensor

    def data_ptr(self) -> int:
        return id(self._tensor)


def live_parameters(model: nn.Module, declared: DeclaredTensors, *, model_dir: Path) -> LiveParameters:
    """Find every tensor of the layout in vLLM's parameters, and verify that they are what the files hold.

    Tied weights are tied again and written from the files, which may hold them under any of their names: vLLM
    loads some names as weights of their own, and leaves the others as they were allocated.

    Raises:
        StartupError: vLLM computes with other tensors, or in another dtype, than the model publishes.
    """
    for names in declared.names.values():
        _tie(model, names)
    parts = _parts_of(model)
    flat: dict[str, Tensor] = {}
    owners: dict[int, nn.Module] = {}
    for span in declared.layout.tensors:
        found = [parts[name] for name in declared.names[span.name] if name in parts]
        flat[span.name] = _checked(span, found)
        owners |= {id(part.owner): part.owner for part in found}
    if len({tensor.data_ptr() for tensor in flat.values()}) != len(flat):
        raise _unusable("vLLM ties weights that the model publishes apart")
    weights = LiveParameters(ParameterWords(flat, declared.layout), owners.values())
    _verify_files(flat, declared, model_dir=model_dir)
    weights.settle()
    _verify_settling(weights, flat, owners.values())
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
        if module in fused and hasattr(owner, "output_sizes"):
            rows = data.split(list(owner.output_sizes))
            parts |= {
                f"{stem}.{part}.{leaf}": _Part(rows_of_part.view(-1), owner)
                for part, rows_of_part in zip(fused[module], rows, strict=True)
            }
        else:
            # The vocabulary is padded to a multiple of 64.
            data = data[: getattr(owner, "org_vocab_size", len(data))] if data.ndim else data
            parts[name] = _Part(data.view(-1), owner)
    return parts


def _checked(span: TensorSpan, found: Sequence[_Part]) -> Tensor:
    """Return the one place that holds a tensor."""
    if len({part.flat.data_ptr() for part in found}) != 1:
        where = "nowhere" if not found else f"{len(found)} times"
        raise _unusable(f"tensor {span.name!r} is {where} among vLLM's parameters, and must be there once")
    flat = found[0].flat
    if flat.numel() != span.elements:
        raise _unusable(
            f"tensor {span.name!r} has {span.elements} elements, vLLM computes with {flat.numel()}"
        )
    held = str(flat.dtype).removeprefix("torch.")
    if held != span.dtype.name and (held, span.dtype) != ("float32", BFLOAT16):
        raise _unusable(f"tensor {span.name!r} is published as {span.dtype.name}, vLLM computes with {held}")
    return flat


def _verify_files(flat: Mapping[str, Tensor], declared: DeclaredTensors, *, model_dir: Path) -> None:
    canonical = {name: first for first, names in declared.names.items() for name in names}
    missing = set(flat)
    for path in weight_files(model_dir):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name not in canonical:
                    continue
                first = canonical[name]
                stored, held = file.get_tensor(name).view(-1), flat[first]
                if len(declared.names[first]) > 1 and first in missing:
                    held.copy_(stored)
                if not _has_bits(held, stored):
                    raise _unusable(f"tensor {name!r} as loaded by vLLM differs from the one in {path.name}")
                missing.discard(first)
    if missing:
        raise _unusable(f"the model's files lack {len(missing)} tensors, {min(missing)!r} among them")


def _has_bits(held: Tensor, stored: Tensor) -> bool:
    if held.dtype is torch.float32 and stored.dtype is torch.bfloat16:
        bits = stored.view(torch.int16).to(held.device).to(torch.int32) << _SHIFT
        return torch.equal(held.view(torch.int32), bits)
    return held.dtype is stored.dtype and torch.equal(
        held.view(torch.uint8), stored.view(torch.uint8).to(held.device)
    )


def _verify_settling(
    weights: LiveParameters, flat: Mapping[str, Tensor], owners: Iterable[nn.Module]
) -> None:
    """Flip the sign of every word and back, and look each time whether the layers compute with it.

    A copy that vLLM made of a matrix and that no version reaches (a tied head once had one) would be seen in
    no digest.
    """
    for _ in range(2):
        for tensor in flat.values():
            if tensor.is_floating_point():
                tensor.neg_()
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
