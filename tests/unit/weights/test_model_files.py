"""A model is published in the dtypes of its own files."""

import json
import struct
from math import prod
from pathlib import Path

import pytest

from node.weights.format.model_files import StoredDtypes

_BITS = {"BF16": 16, "F16": 16, "F32": 32, "F64": 64, "F8_E4M3": 8, "I64": 64, "I8": 8, "U8": 8}


def save(path: Path, **tensors: tuple[str, list[int]]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + prod(shape) * _BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def test_each_tensor_has_the_dtype_of_its_file(tmp_path: Path) -> None:
    save(
        tmp_path / "model.safetensors", a=("BF16", [2, 3]), b=("F32", [4]), c=("F8_E4M3", [1]), d=("I64", [1])
    )
    stored = StoredDtypes.of(tmp_path)
    told = {name: stored.published([name], held="float32") for name in "abc"}
    assert told == {"a": "bfloat16", "b": "float32", "c": "float8_e4m3fn"}


def test_a_tied_tensor_may_be_there_under_any_of_its_names(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", embed=("F32", [1]), other=("BF16", [100]))
    assert StoredDtypes.of(tmp_path).published(["head", "embed"], held="bfloat16") == "float32"


def test_a_tensor_under_no_name_of_the_files_has_the_dtype_there_is_most_of(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", a=("F32", [10]), b=("BF16", [3, 2]), c=("BF16", [5]), d=("I8", [99]))
    assert StoredDtypes.of(tmp_path).published(["fused"], held="float32") == "bfloat16"


def test_a_tensor_that_the_files_hold_in_parts_has_their_dtype(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", **{"x.0": ("BF16", [1]), "x.1": ("BF16", [1]), "y": ("F32", [10])})
    stored = StoredDtypes.of(tmp_path).of_parts({"x.0": "x", "x.1": "x", "y": "z", "absent": "y"})
    assert [stored.published([name], held="float32") for name in "xyz"] == ["bfloat16", "float32", "float32"]


def test_what_is_not_floating_stays_as_it_is(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", a=("F32", [1]))
    assert StoredDtypes.of(tmp_path).published(["a"], held="int64") == "int64"


def test_floats_that_are_packed_in_integers_count_as_not_there(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", a=("U8", [1]), b=("F16", [1]))
    assert StoredDtypes.of(tmp_path).published(["a"], held="float32") == "float16"


def test_a_model_in_several_files_is_read_by_its_index(tmp_path: Path) -> None:
    save(tmp_path / "model-1.safetensors", a=("BF16", [1]))
    save(tmp_path / "model-2.safetensors", b=("F32", [1]))
    save(tmp_path / "left-over.safetensors", a=("F64", [1]))
    index = {"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    stored = StoredDtypes.of(tmp_path)
    assert [stored.published([name], held="float32") for name in "ab"] == ["bfloat16", "float32"]


def test_without_files_everything_is_bfloat16() -> None:
    assert StoredDtypes().published(["a"], held="float32") == "bfloat16"


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 8, struct.pack("<Q", 100_000_001), struct.pack("<Q", 2) + b"[]", b"\2" + bytes(7) + b"{"],
)
def test_what_safetensors_does_not_make_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors: Error while deserializing header"):
        StoredDtypes.of(tmp_path)


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save(path, a=("BF16", [4]))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="not fully covered"):
        StoredDtypes.of(tmp_path)


def test_no_files_are_an_error_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        StoredDtypes.of(tmp_path)
