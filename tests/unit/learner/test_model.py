from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.model import Policy, load_policy
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


@pytest.mark.parametrize(
    ("master", "word"),
    # 0x3F80 is 1.0, the next is 1.0078125; halfway between them goes to the even one.
    [(1.0, 0x3F80), (1.00390625, 0x3F80), (1.0039064, 0x3F81), (1.01171875, 0x3F82), (-1.00390625, 0xBF80)],
)
def test_a_snapshot_rounds_to_nearest_even(policy: Policy, master: float, word: int) -> None:
    with torch.no_grad():
        policy.tensors["model.norm.weight"][0] = master
    words = np.empty(policy.layout.words, np.uint16)
    policy.snapshot(words)
    [span] = [span for span in policy.layout.tensors if span.name == "model.norm.weight"]
    assert words[span.start_word] == word


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_are_those_of_the_tempered_softmax_of_the_whole_vocabulary(
    policy: Policy, model_dir: Path, temperature: float
) -> None:
    tokens = torch.tensor([[5, 9, 3, 17, 1]])
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        expected = torch.log_softmax(model(tokens).logits / temperature, dim=-1)
        expected = expected[0, 1:4].gather(1, tokens[0, 2:, None]).squeeze(1)
        actual = policy.token_logprobs(tokens[:, :-1], tokens[:, 2:], torch.tensor([temperature]))
    torch.testing.assert_close(actual[0], expected, rtol=0, atol=1e-5)


def test_a_parameter_that_is_not_a_number_is_noticed(policy: Policy) -> None:
    assert policy.is_finite()
    with torch.no_grad():
        policy.tensors["model.norm.weight"][0] = torch.nan
    assert not policy.is_finite()


@pytest.mark.parametrize("content", [None, "{", '{"model_type": "t5"}'])
def test_what_is_not_a_causal_language_model_is_refused_with_its_path(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(StartupError, match=str(tmp_path)):
        load_policy(tmp_path, device="cpu")
