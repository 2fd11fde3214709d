"""Models of other families than the tiny one's: learner and engines score them as transformers does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from learner.model.model import load_policy
from node.errors import StartupError
from node.values.groups.sampling_parameters import SamplingParameters
from sampler.engines.engine_registry import has_vllm
from sampler.engines.vllm.model_directory import DeclaredTensors
from support.engines import Driven, load
from support.model_families import ENDS, FAMILIES, make_model
from support.tiny_model import VOCABULARY_SIZE

MIXTURES = ("Qwen3Moe", "Mixtral", "Olmoe", "Qwen2Moe", "Glm4Moe")
WAYS = [
    *(("torch", family) for family in FAMILIES),
    # In a process of its own: vLLM changes transformers' classes in the one that it is in. The first has
    # fused tensors in its files, and for the second vLLM computes with those classes.
    *(("vllm-own", family) for family in ("Phi3", "SmolLM3", *MIXTURES) if has_vllm("cpu")),
    *(("vllm-two", family) for family in ("Qwen2Moe",) if has_vllm("cpu")),
]
PROMPTS = ("7", "abc def ghi 12345")
SAMPLING = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=16)
GREEDY = SamplingParameters(temperature=1.0, top_p=1.0, top_k=1, max_new_tokens=16)


@pytest.mark.parametrize(("engine", "family"), WAYS)
def test_a_family_is_scored_and_sampled_as_transformers_does(
    engine: str, family: str, tmp_path: Path
) -> None:
    directory = make_model(tmp_path / "model", family, FAMILIES[family])
    policy = load_policy(directory, device="cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.randint(2, VOCABULARY_SIZE, (2, 24), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(ids.numel()).view(ids.shape)[:, :-1].flatten()
    targets = ids[:, 1:]
    scored = policy.scorer(ids, positions, targets.flatten(), torch.ones(targets.numel()))
    with torch.no_grad():
        logprobs = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, targets.unsqueeze(-1)).flatten()
    torch.testing.assert_close(scored.detach(), logprobs, atol=1e-5, rtol=0)
    driven = Driven.of(load(engine, directory, apply="in_place"), "in_place", directory)
    assert driven.engine.layout == policy.layout
    other = driven.shuffled
    for prompt in PROMPTS:
        driven.add(prompt, SAMPLING)
    for _ in range(4):
        driven.engine.step()
    driven.take(other)
    np.testing.assert_array_equal(driven.live, other)
    versions = set()
    for prompt, finished in driven.run_out().items():
        driven.assert_scored(prompt, finished.completions, SAMPLING)
        for completion in finished.completions:
            versions |= set(completion.policy_version.tolist())
    assert versions == {0, 1}
    for prompt in PROMPTS:
        driven.add(prompt, GREEDY, completions=1)
    for prompt, finished in driven.run_out().items():
        drawn = finished.completions[0].token_ids.tolist()
        assert drawn == driven.greedy(prompt, tokens=GREEDY.max_new_tokens)
    driven.engine.close()


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_experts_are_published_in_the_dtype_of_their_files(family: str, tmp_path: Path) -> None:
    """Files hold each expert apart, here in bfloat16 beside embeddings of more elements in float32."""
    directory = make_model(tmp_path / "model", family, FAMILIES[family] | {"vocab_size": 4096})
    stored = load_file(directory / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        stored[name] = stored[name].float()
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    layout = load_policy(directory, device="cpu").layout
    wide = {span.name for span in layout.tensors if span.dtype.name == "float32"}
    assert wide == {"model.embed_tokens.weight", "lm_head.weight"}
    assert layout == DeclaredTensors.of(directory).layout == load("torch", directory).layout


def test_a_model_with_another_state_than_keys_and_values_is_refused(tmp_path: Path) -> None:
    settings = ENDS | {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 32,
        "state_size": 4,
        "num_hidden_layers": 1,
    }
    directory = make_model(tmp_path / "model", "Mamba", settings)
    with pytest.raises(StartupError, match=r"does not serve a model of the type mamba.*engine = 'vllm'"):
        load("torch", directory)
