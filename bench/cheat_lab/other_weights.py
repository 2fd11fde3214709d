"""A sampler whose model computes with other weights than the version has that it names.

The words that the version was verified by stay as they are, and pass every audit; a copy of the model draws.

    another model   noise of ``NOISE`` of a tensor's standard deviation on each
    stale version   the newest that is at least ``BEHIND_VERSIONS`` older
    base model      version 0, whatever was published since
    8-bit weights   int8 with a scale a row, as quantised engines compute
"""

import copy
import importlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

NOISE: Final = 0.2
BEHIND_VERSIONS: Final = 8

Tensors = Mapping[str, Tensor]
Change = Callable[[int, Tensors], Tensors]
"""A version's number and tensors to those that draw in its place."""


def noisy(seed: int) -> Change:
    """Add the same noise to every version."""

    def change(_: int, tensors: Tensors) -> Tensors:
        random = torch.Generator().manual_seed(seed)
        return {name: _noisy(tensor, random) for name, tensor in tensors.items()}

    return change


def stale(behind_versions: float = BEHIND_VERSIONS) -> Change:
    """Draw by the newest version that is so much older, or the oldest there was."""
    known: deque[tuple[int, Tensors]] = deque()

    def change(version: int, tensors: Tensors) -> Tensors:
        known.append((version, {name: tensor.clone() for name, tensor in tensors.items()}))
        while len(known) > 1 and known[1][0] <= version - behind_versions:
            known.popleft()
        return known[0][1]

    return change


def eight_bit() -> Change:
    """Round every matrix to int8, a scale a row."""

    def change(_: int, tensors: Tensors) -> Tensors:
        return {name: _in_8_bits(tensor) for name, tensor in tensors.items()}

    return change


def draw_by(change: Change) -> None:
    """Make every torch engine of this process draw by other weights than its own."""
    engines = importlib.import_module("sampler.engines.torch.torch_engine")
    load, serve = engines.LiveModel.load, engines.TorchEngine.serve
    models: list[tuple[torch.nn.Module, torch.nn.Module]] = []

    def put(version: int) -> None:
        own, drawing = models[-1]
        with torch.no_grad():
            changed = change(version, dict(own.named_parameters()))
            _put(drawing.named_parameters(), changed)

    def loaded(*arguments: Any, **keywords: Any) -> Any:
        live = load(*arguments, **keywords)
        models.append((live.model, copy.deepcopy(live.model)))
        put(0)
        return replace(live, model=models[-1][1])

    def serving(self: Any, version: int) -> None:
        put(version)
        serve(self, version)

    engines.LiveModel.load = loaded
    engines.TorchEngine.serve = serving


def _put(parameters: Iterable[tuple[str, Tensor]], changed: Tensors) -> None:
    for name, parameter in parameters:
        parameter.copy_(changed[name])


def _noisy(tensor: Tensor, random: torch.Generator) -> Tensor:
    noise = torch.randn(tensor.shape, generator=random)
    spread = tensor.float().std(correction=0)
    return tensor + (NOISE * spread * noise).to(tensor.dtype)


def _in_8_bits(tensor: Tensor) -> Tensor:
    if tensor.ndim < 2:
        return tensor
    scale = tensor.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 127
    return (tensor / scale).round() * scale
