"""The dtype each tensor is published in: the one that the model's own files hold it in.

Learner and sampler load the same directory, each in the dtype it computes with; what they exchange must not
depend on that. Only the headers of the safetensors files are read.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, Field, TypeAdapter

from node.weights.format.dtypes import BFLOAT16, DTYPES

_HEADER_BYTES: Final = 100_000_000
"""The limit of safetensors itself."""

_NAMES: Final = {
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
"""Floating dtypes of safetensors by torch's names."""


class _Entry(BaseModel):
    dtype: str
    shape: list[Annotated[int, Field(ge=0)]]


_HEADER: Final = TypeAdapter(dict[str, _Entry | dict[str, str]])


class _Index(BaseModel):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class StoredDtypes:
    """Name -> dtype of the floating-point tensors; without any, everything is bfloat16."""

    by_name: Mapping[str, str] = field(default_factory=dict)
    most: str = BFLOAT16.name
    """The dtype of most elements: for tensors that the files have under another name than the model."""

    @classmethod
    def of(cls, model_dir: Path) -> "StoredDtypes":
        """Read the headers of the files in ``model_dir``.

        Raises:
            ValueError: a file is not a safetensors file.
            OSError: a file cannot be read.
        """
        by_name: dict[str, str] = {}
        elements: Counter[str] = Counter()
        for path in _files(model_dir):
            for name, entry in _header(path).items():
                if isinstance(entry, _Entry) and entry.dtype in _NAMES:
                    by_name[name] = _NAMES[entry.dtype]
                    elements[by_name[name]] += prod(entry.shape)
        most = max(elements, key=lambda dtype: (elements[dtype], dtype), default=BFLOAT16.name)
        return cls(by_name, most)

    def published(self, names: Iterable[str], *, held: str) -> str:
        """Return the dtype that a tensor with these names, at least one, is published in.

        Args:
            held: its dtype in memory, which is kept unless it is floating.
        """
        if held in DTYPES and not DTYPES[held].is_floating:
            return held
        known = (self.by_name[name] for name in sorted(names, key=str.encode) if name in self.by_name)
        return next(known, self.most)


def _files(model_dir: Path) -> list[Path]:
    """Return the files that transformers would load."""
    whole, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    if whole.exists() or not index.exists():
        return [whole]
    names = set(_Index.model_validate_json(index.read_bytes()).weight_map.values())
    return [model_dir / name for name in sorted(names)]


def _header(path: Path) -> dict[str, _Entry | dict[str, str]]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _HEADER_BYTES:
            raise ValueError(f"{path} has a header of {size} bytes")
        return _HEADER.validate_json(file.read(size))
