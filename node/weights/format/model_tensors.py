"""Which tensors of a model are published, under which name and in which dtype; pure.

Those of its state dict, each storage once under its bytewise smallest name. Floats are published in the dtype
that the model's own files have them in, the rest as they are. Learner and sampler both ask here, so that they
derive one layout from one model directory. Needs no torch: a tensor is whatever has torch's three members.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from node.weights.format.layout import TensorSpec
from node.weights.format.model_files import StoredDtypes


class ModelTensor(Protocol):
    """The part of torch.Tensor that is used here."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> object: ...

    def data_ptr(self) -> int: ...


Tensor = TypeVar("Tensor", bound=ModelTensor)


def canonical_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each storage once, under its bytewise smallest name, in the order of the names' bytes.

    Tied weights are one tensor with several names; whoever writes it once has written them all.
    """
    return {names[0]: state[names[0]] for names in _names_of_storages(state)}


def tensor_specs(state: Mapping[str, ModelTensor], stored: StoredDtypes) -> Iterator[TensorSpec]:
    """Describe the canonical tensors as they are published, whatever the model is computed in."""
    for names in _names_of_storages(state):
        tensor = state[names[0]]
        held = str(tensor.dtype).removeprefix("torch.")
        yield TensorSpec(names[0], tuple(tensor.shape), stored.published(names, held=held))


def names_in_files(
    state: Mapping[str, Any], revert: Callable[[dict[str, Any]], Iterable[str]]
) -> dict[str, str]:
    """Return names in files -> in the model, where transformers renames or joins tensors as it loads.

    Args:
        revert: Returns a tensor as files hold it: ``revert_weight_conversion`` of transformers, of a model.
    """
    return {part: name for name, tensor in state.items() for part in revert({name: tensor.to("meta")})}


def _names_of_storages(state: Mapping[str, ModelTensor]) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name in sorted(state, key=str.encode):
        names.setdefault(state[name].data_ptr(), []).append(name)
    return list(names.values())
