"""A model whose tensors are of many dtypes, from the learner's masters to what a sampler computes with."""

from pathlib import Path

import numpy as np
import pytest
import torch

from bench.held_policy import HeldPolicy
from bench.whole_versions import encode_version
from learner.model.model import load_policy
from node.weights.format.digests import Words
from node.weights.format.layout import Layout
from sampler.engines.torch.torch_engine import TorchEngine
from sampler.engines.words.model_words import ArrayWords, copy_words
from support.model_words import words_of
from support.tiny_model import make_mixed_model
from support.whole_version import WholeVersion

DTYPES = {"float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"}


def tensor_of(words: Words, layout: Layout, name: str) -> torch.Tensor:
    [span] = [span for span in layout.tensors if span.name == name]
    part = torch.from_numpy(words[span.start_word :][: span.words].copy())
    return part.view(getattr(torch, span.dtype.name))[: span.elements].view(span.shape)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_mixed_model(directory)
    return directory


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_version_0_is_the_files_to_the_bit_on_both_sides(tmp_path: Path, compute_dtype: torch.dtype) -> None:
    stored = make_mixed_model(tmp_path)
    policy = load_policy(tmp_path, device="cpu")
    engine = TorchEngine(tmp_path, device="cpu", compute_dtype=compute_dtype, threads=1, seed=0)
    assert {frame.dtype.name for frame in policy.layout.frames} == DTYPES
    assert policy.layout == engine.layout
    words = np.empty(policy.layout.words, np.uint16)
    policy.snapshot(words)
    np.testing.assert_array_equal(words_of(engine.weights.live, layout=engine.layout), words)
    for span in policy.layout.tensors:
        name = "model.embed_tokens.weight" if span.name == "lm_head.weight" else span.name
        made = tensor_of(words, policy.layout, span.name)
        assert made.dtype == stored[name].dtype
        assert torch.equal(made.view(torch.uint8), stored[name].view(torch.uint8))


@pytest.mark.parametrize("is_in_place", [False, True])
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_a_step_arrives_bit_for_bit_and_the_model_computes_with_it(
    model_dir: Path, compute_dtype: torch.dtype, is_in_place: bool
) -> None:
    policy = load_policy(model_dir, device="cpu")
    layout = policy.layout
    versions = []
    for number in range(2):
        words = np.empty(layout.words, np.uint16)
        policy.snapshot(words)
        versions.append(HeldPolicy.of(number, words, layout=layout))
        with torch.no_grad():
            for tensor in policy.parameters.values():
                tensor.add_(1e-4 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3)))
    base, new = versions
    for held in (base, None):
        encoded = encode_version(
            new.words,
            version=1,
            base=held,
            layout=layout,
            run_id="run",
            learner_epoch=1,
            published_at_s=0.0,
        )
        stage = WholeVersion(encoded.manifest, layout=layout, base=held)
        stage.take_held()
        for frame in stage.missing():
            stage.put(frame, encoded.payloads[frame])
        assert stage.finish().version == new.version
    engine = TorchEngine(model_dir, device="cpu", compute_dtype=compute_dtype, threads=1, seed=0)
    if is_in_place:
        copy_words(ArrayWords(new.words), engine.weights.live, layout=layout)
        engine.weights.settle()
    else:
        spare = engine.weights.new_spare()
        copy_words(ArrayWords(new.words), spare, layout=layout)
        engine.weights.swap(spare)
    np.testing.assert_array_equal(words_of(engine.weights.live, layout=layout), new.words)
    live = engine._model.state_dict()
    for span in layout.tensors:
        expected = tensor_of(new.words, layout, span.name).to(live[span.name].dtype)
        assert torch.equal(live[span.name], expected), span.name
