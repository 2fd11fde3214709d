"""Which tensors are published, under which name and in which dtype; no torch needed."""

from dataclasses import dataclass

from node.weights.format.layout import TensorSpec
from node.weights.format.model_files import StoredDtypes
from node.weights.format.model_tensors import canonical_tensors, tensor_specs


@dataclass(frozen=True)
class Tensor:
    storage: int
    shape: tuple[int, ...] = (2, 3)
    dtype: str = "torch.float32"

    def data_ptr(self) -> int:
        return self.storage


STATE = {
    "wte": Tensor(1),
    "lm_head": Tensor(1),
    "b": Tensor(2, shape=(4,)),
    "B": Tensor(3, dtype="torch.int64"),
}


def test_a_storage_is_published_once_under_its_bytewise_smallest_name_in_the_order_of_names() -> None:
    assert list(canonical_tensors(STATE)) == ["B", "b", "lm_head"]
    assert canonical_tensors(STATE)["lm_head"] is STATE["lm_head"]


def test_floats_are_published_as_the_files_have_them_under_any_of_their_names_and_the_rest_as_it_is() -> None:
    stored = StoredDtypes({"wte": "float16", "B": "bfloat16"}, most="bfloat16")
    assert list(tensor_specs(STATE, stored)) == [
        TensorSpec("B", (2, 3), "int64"),
        TensorSpec("b", (4,), "bfloat16"),
        TensorSpec("lm_head", (2, 3), "float16"),
    ]
