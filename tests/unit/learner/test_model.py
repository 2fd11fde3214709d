from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from learner.model.model import Policy, load_policy
from node.errors import StartupError
from support.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def policy(model_dir: Path) -> Policy:
    return load_policy(model_dir, device="cpu")


def test_tied_weights_are_one_tensor_under_the_smaller_name(policy: Policy) -> None:
    assert "lm_head.weight" in policy.tensors
    assert "model.embed_tokens.weight" not in policy.tensors
    assert [span.name for span in policy.layout.tensors] == sorted(policy.tensors, key=str.encode)


def test_masters_are_float32_and_version_zero_is_the_saved_model(policy: Policy, model_dir: Path) -> None:
    words = np.empty(policy.layout.words, np.uint16)
    policy.snapshot(words)
    saved = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).state_dict()
    for span in policy.layout.tensors:
        assert policy.tensors[span.name].dtype == torch.float32
        expected = saved[span.name].view(torch.int16).numpy().view(np.uint16).ravel()
        assert (words[span.start_word : span.start_word + span.words] == expected).all()


def test_a_parameter_that_is_not_a_number_is_noticed(policy: Policy) -> None:
    assert policy.is_finite()
    with torch.no_grad():
        policy.tensors["model.norm.weight"][0] = torch.nan
    assert not policy.is_finite()


@pytest.mark.parametrize("content", [None, "{", '{"model_type": "t5"}'])
def test_a_directory_without_a_causal_language_model_is_refused_with_its_path(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(StartupError, match=str(tmp_path)):
        load_policy(tmp_path, device="cpu")


def gradients(policy: Policy) -> tuple[Tensor, dict[str, Tensor]]:
    tokens = torch.tensor([[5, 9, 3, 17, 1, 8], [2, 2, 7, 30, 4, 0]])
    positions = torch.tensor([1, 2, 3, 4, 5, 6, 7])
    temperature = torch.tensor([1.0] * 4 + [0.7] * 3)
    logprob = policy.scorer(tokens[:, :-1], positions, tokens[:, 1:].flatten()[positions], temperature)
    grads = torch.autograd.grad(logprob.sum(), list(policy.parameters.values()))
    return logprob.detach(), dict(zip(policy.parameters, grads, strict=True))


def test_rematerialised_layers_change_nothing_but_memory(model_dir: Path) -> None:
    plain, selective, whole = (
        load_policy(model_dir, device="cpu", rematerialise=what) for what in ("none", "selective", "layers")
    )
    expected, wanted = gradients(plain)
    for policy in (selective, whole):
        actual, got = gradients(policy)
        assert torch.equal(actual, expected)
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert saved_bytes(whole) < 0.7 * saved_bytes(plain)
    assert products_backward(selective) == products_backward(plain) < products_backward(whole)


class CountsProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts products of matrices and attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(word in str(func) for word in ("mm", "dot_product"))
        return func(*args, **kwargs or {})


def products_backward(policy: Policy) -> int:
    tokens = torch.arange(40)[None] % 30
    logprob = policy.scorer(tokens[:, :-1], torch.arange(39), tokens[0, 1:], torch.ones(39))
    products = CountsProducts()
    with products:
        logprob.backward(torch.ones_like(logprob))
    return products.count


def saved_bytes(policy: Policy) -> int:
    """Elements that the graph of a forward pass keeps for the backward pass."""
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        tokens = torch.arange(40)[None] % 30
        policy.scorer(tokens[:, :-1], torch.arange(39), tokens[0, 1:], torch.ones(39))
    return sum(seen.values()) - sum(p.untyped_storage().nbytes() for p in policy.parameters.values())


def test_narrow_products_move_logprobs_a_little_and_keep_wide_gradients(model_dir: Path) -> None:
    exact, _ = gradients(load_policy(model_dir, device="cpu"))
    narrow, got = gradients(load_policy(model_dir, device="cpu", compute_dtype=torch.bfloat16))
    assert narrow.dtype == torch.float32
    assert all(gradient.dtype == torch.float32 for gradient in got.values())
    assert not torch.equal(narrow, exact)
    torch.testing.assert_close(narrow, exact, rtol=0, atol=0.5)
