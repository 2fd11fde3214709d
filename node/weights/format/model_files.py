"""The dtypes of a model's own safetensors files: each tensor is published in the dtype its file has.

Learner and sampler load the same directory, each in the dtype it computes with; what they exchange
must not depend on that. Only the headers of the files are read, without torch.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Final

from pydantic import BaseModel
from safetensors import SafetensorError, safe_open

from node.weights.format.dtypes import BFLOAT16, DTYPES

WHOLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
"""Which file has which tensor, where there are several."""

TORCH_NAMES: Final = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
"""Floating dtypes: their names in safetensors -> in torch."""


class _Index(BaseModel):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class StoredDtypes:
    """Floating tensors by name -> dtype; without any, everything is bfloat16."""

    by_name: Mapping[str, str] = field(default_factory=dict)
    most: str = BFLOAT16.name
    """The dtype of most elements: for tensors that the files have under no name of the model's."""

    @classmethod
    def of(cls, model_dir: Path) -> "StoredDtypes":
        """Read them from the files that transformers would load.

        Raises ValueError: a file is not what safetensors makes, or is cut short. OSError: a file cannot be
        read.
        """
        by_name: dict[str, str] = {}
        elements: Counter[str] = Counter()
        for path in weight_files(model_dir):
            for name, dtype, shape in _tensors(path):
                if dtype in TORCH_NAMES:
                    by_name[name] = TORCH_NAMES[dtype]
                    elements[by_name[name]] += prod(shape)
        most = max(elements, key=lambda dtype: (elements[dtype], dtype), default=BFLOAT16.name)
        return cls(by_name, most)

    def of_parts(self, names: Mapping[str, str]) -> "StoredDtypes":
        """Return them by the model's ``names`` (file -> model), which may differ or join parts (experts)."""
        of_parts = {names[part]: dtype for part, dtype in self.by_name.items() if part in names}
        return replace(self, by_name={**of_parts, **self.by_name})

    def published(self, names: Iterable[str], *, held: str) -> str:
        """Return the dtype that a tensor of these names is published in.

        What it has in memory, ``held``, is kept unless it is floating.
        """
        if held in DTYPES and not DTYPES[held].is_floating:
            return held
        known = (self.by_name[name] for name in sorted(names, key=str.encode) if name in self.by_name)
        return next(known, self.most)


def weight_files(model_dir: Path) -> list[Path]:
    """Return the safetensors files that transformers would load."""
    whole, index = model_dir / WHOLE_FILE, model_dir / INDEX_FILE
    if whole.exists() or not index.exists():
        return [whole]
    names = set(_Index.model_validate_json(index.read_bytes()).weight_map.values())
    return [model_dir / name for name in sorted(names)]


def _tensors(path: Path) -> Iterator[tuple[str, str, list[int]]]:
    with path.open("rb"):  # for the system's own OSError: that of safetensors has neither number nor path
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    tensor = file.get_slice(name)
                    yield name, tensor.get_dtype(), tensor.get_shape()
        except SafetensorError as error:
            raise ValueError(f"{path}: {error}") from error
