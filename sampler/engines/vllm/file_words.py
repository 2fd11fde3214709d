"""The words of the base model's files, compared with those that vLLM loaded from them."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from node.weights.format.model_files import weight_files
from sampler.engines.vllm.declared_tensors import DeclaredTensors, Form, unusable
from sampler.engines.vllm.parameter_words import SHIFT, Shard


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
