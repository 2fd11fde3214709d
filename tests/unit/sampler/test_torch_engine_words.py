"""The words that a torch engine loads, shows and serves."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from node.weights.format.model_tensors import canonical_tensors
from sampler.engines.torch_engine import TorchEngine
from support.tiny_model import make_tiny_model
from support.torch_engines import live


def test_words_cover_tied_weights_once_under_the_smallest_name(engine: TorchEngine) -> None:
    names = [spec.name for spec in engine.layout.tensors]
    assert names == sorted(names, key=str.encode)
    assert "lm_head.weight" in names
    assert "model.embed_tokens.weight" not in names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_words_of_the_base_model_are_its_own_whatever_it_computes_in(
    model_dir: Path, dtype: torch.dtype
) -> None:
    engine = TorchEngine(model_dir, device="cpu", compute_dtype=dtype, threads=1, seed=7)
    tensors = canonical_tensors(AutoModelForCausalLM.from_pretrained(model_dir).state_dict())
    expected = torch.cat([t.bfloat16().view(torch.int16).view(-1) for t in tensors.values()])
    np.testing.assert_array_equal(live(engine), expected.numpy().view(np.uint16))


def test_a_base_model_saved_in_float32_is_served_as_it_is(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)
    model.save_pretrained(tmp_path)
    engine = TorchEngine(tmp_path, device="cpu", compute_dtype=torch.float32, threads=1, seed=7)
    assert {span.dtype.name for span in engine.layout.tensors} == {"float32"}
    served, saved = engine._model.state_dict(), model.state_dict()
    assert all(torch.equal(served[name], saved[name]) for name in saved)
