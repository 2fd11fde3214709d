"""The tensors that a model directory publishes, read without loading the model, and its files' words."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from node.errors import StartupError
from node.weights.format.layout import Layout
from node.weights.format.model_files import StoredDtypes, weight_files
from node.weights.format.model_tensors import canonical_tensors, tensor_specs
from sampler.engines.vllm.shards import Shard
from sampler.engines.words.torch_words import SHIFT

Form = Mapping[str, Tensor]
"""A tensor as files may hold it: names there -> the rows that each has, [n], counted over all dimensions but
the last."""


@dataclass(frozen=True, slots=True, eq=False)
class DeclaredTensors:
    """The tensors that a model directory publishes.

    Attributes:
        names: Name in the layout -> every name that shares its storage.
        forms: Name in the layout -> the forms that files may hold it in: as a whole under each of its names,
            and as transformers saves it (experts apart, under other names).
    """

    layout: Layout
    names: Mapping[str, Sequence[str]]
    forms: Mapping[str, Sequence[Form]]

    @classmethod
    def of(cls, model_dir: Path) -> "DeclaredTensors":
        """Read configuration and headers of the files; OSError or ValueError if they are not a model's."""
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, trust_remote_code=False
            )
        model.tie_weights()
        state = {name: _Declared(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
        same: dict[int, list[str]] = {}
        for name, tensor in state.items():
            same.setdefault(tensor.data_ptr(), []).append(name)
        names = {name: same[tensor.data_ptr()] for name, tensor in canonical_tensors(state).items()}
        forms: dict[str, list[Form]] = {}
        for first, others in names.items():
            shape = state[first].shape[:-1]
            rows = torch.arange(shape.numel()).view(*shape, 1)
            known = [{name: rows} for name in others]
            saved = [revert_weight_conversion(model, whole) for whole in known]
            known += [form for form in saved if form.keys().isdisjoint(others)]
            forms[first] = [{part: numbers.flatten() for part, numbers in form.items()} for form in known]
        stored = StoredDtypes.of(model_dir).of_parts(
            {part: name for name, among in forms.items() for form in among for part in form}
        )
        return cls(Layout.of(tensor_specs(state, stored)), names, forms)


def unusable(what: str) -> StartupError:
    """Return the error of a model that vLLM cannot compute as it is published."""
    return StartupError(f"vLLM cannot serve this model: {what}", fix="Set sampler.engine = 'torch'.")


def verify_files(
    shards: Mapping[str, Shard], declared: DeclaredTensors, *, model_dir: Path, are_changed: bool
) -> None:
    """Verify that every tensor is bit for bit what the files hold; write tied ones first.

    Args:
        shards: By name in the layout.
        are_changed: Write all of them first.
    Raises:
        StartupError: one differs, or is in no file.
    """
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(path, framework="pt")) for path in weight_files(model_dir)]
        files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - not a dict
        for first, shard in shards.items():
            there = [form for form in declared.forms[first] if form.keys() <= files.keys()]
            if not there:
                raise unusable(f"the model's files lack tensor {first!r}")
            stored = [shard.of(_joined(form, files)) for form in there]
            if are_changed or len(declared.names[first]) > 1:
                shard.values.copy_(stored[0])
            if not all(_has_bits(shard.values, one) for one in stored):
                raise unusable(f"tensor {first!r} as loaded by vLLM differs from the model's files")


def _joined(form: Form, files: Mapping[str, Any]) -> Tensor:
    """Return a tensor of the layout, with its rows in order."""
    parts = [files[name].get_tensor(name) for name in form]
    if len(parts) == 1:
        return parts[0]  # type: ignore[no-any-return]
    rows = torch.cat([part.reshape(len(of), -1) for part, of in zip(parts, form.values(), strict=True)])
    return rows[torch.cat(tuple(form.values())).argsort()]


def _has_bits(held: Tensor, stored: Tensor) -> bool:
    if held.dtype is torch.float32 and stored.dtype is torch.bfloat16:
        bits = stored.contiguous().view(torch.int16).to(held.device).to(torch.int32) << SHIFT
        return torch.equal(held.view(torch.int32), bits)
    return held.dtype is stored.dtype and torch.equal(
        held.view(torch.uint8), stored.contiguous().view(torch.uint8).to(held.device)
    )


class _Declared:
    """A tensor without memory. On "meta" every address is 0, but tied weights are one object."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self._tensor = tensor

    def data_ptr(self) -> int:
        return id(self._tensor)
