"""What a model directory publishes, read without loading the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from node.weights.format.layout import Layout
from node.weights.format.model_files import StoredDtypes
from node.weights.format.model_tensors import canonical_tensors, tensor_specs


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
