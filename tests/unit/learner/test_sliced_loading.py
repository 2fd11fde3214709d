"""A model built without values and filled from the files is the model that transformers loads."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.model.sliced_loading import EmptyModel
from support.tiny_model import make_tiny_model


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
