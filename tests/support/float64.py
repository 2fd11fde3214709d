"""Models that compute in float64 throughout, so that what differs by more than rounding shows."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel


class StaysWide(TorchFunctionMode):
    """Keeps float64 what a family would round to float32, such as its norms: the order of sums would show."""

    def __torch_function__(
        self, function: Any, _: Any, arguments: Any = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        keywords = keywords or {}
        if arguments and isinstance(arguments[0], Tensor) and arguments[0].dtype == torch.float64:
            if function is Tensor.float:
                return arguments[0]
            arguments = [torch.float64 if one is torch.float32 else one for one in arguments]
            keywords = {key: torch.float64 if one is torch.float32 else one for key, one in keywords.items()}
        return function(*arguments, **keywords)


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model compute in float64, also where it normalises, in place; return it."""
    for module in model.double().modules():
        if "Norm" in type(module).__name__:
            module.forward = partial(_stay_wide, module.forward)
    return model


def _stay_wide(forward: Any, *arguments: Any, **keywords: Any) -> Any:
    with StaysWide():
        return forward(*arguments, **keywords)
