"""A model built without values and filled from the files is the model that transformers loads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, GraniteConfig, LlamaConfig
from transformers import PretrainedConfig as Config

from learner.model.scorer import has_plain_head
from learner.model.sliced_loading import EmptyModel
from support.tiny_model import make_tiny_model

SIZES: Any = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
}


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_filled_model_is_the_one_that_transformers_loads(tmp_path: Path, is_tied: bool) -> None:
    directory = make_tiny_model(tmp_path, is_tied=is_tied)
    empty = EmptyModel.of(directory)
    assert empty is not None
    state = empty.model.state_dict()
    empty.fill({name: state[name] for name in empty.names}, directory)
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(state[name], tensor), name
    tokens = torch.arange(9)[None]
    assert torch.equal(empty.model.train(False)(tokens).logits, loaded(tokens).logits)


@pytest.mark.parametrize(
    ("config", "is_plain"),
    [
        (LlamaConfig(**SIZES), True),
        (GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=40), True),
        (Gemma2Config(**SIZES, head_dim=8), False),
        (GraniteConfig(**SIZES, logits_scaling=8.0), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_one_layer_of_a_family_shows_whether_its_head_is_plain(
    tmp_path: Path, config: Config, is_plain: bool
) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    empty = EmptyModel.of(tmp_path)
    assert empty is not None
    assert has_plain_head(empty.small) is is_plain
