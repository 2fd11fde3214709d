"""Models of other families than the tiny one's: learner and engines score them as transformers does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from learner.training.model import load_policy
from node.errors import StartupError
from node.rollout import SamplingParameters
from sampler.engines.engine_registry import has_vllm
from support.engines import Driven, load
from support.tiny_model import VOCABULARY_SIZE, make_tiny_model

ENDS = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
USUAL = ENDS | {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 128,  # vLLM's heads have 32 numbers or more on a CPU
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": USUAL
    | {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "Mistral": USUAL | {"sliding_window": 8},
    "Gemma3Text": USUAL | {"sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 16},
    "Phi3": USUAL,
    "Granite": USUAL | {"logits_scaling": 4.0, "residual_multiplier": 0.5},
    "SmolLM3": USUAL | {"no_rope_layers": [1, 0]},
    "Qwen3Moe": USUAL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "GPT2": ENDS
    | {"vocab_size": VOCABULARY_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    | {"initializer_range": 0.2},
}
WAYS = [
    *(("torch", family) for family in FAMILIES),
    # In a process of its own: vLLM changes transformers' classes in the one that it is in. The first has
    # fused tensors in its files, and for the second vLLM computes with those classes.
    *(("vllm-own", family) for family in ("Phi3", "SmolLM3") if has_vllm("cpu")),
]
PROMPTS = ("7", "abc def ghi 12345")
SAMPLING = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=16)


def make_model(directory: Path, family: str, settings: dict[str, Any]) -> Path:
    """Save a random bf16 model of a family, with the tiny one's tokenizer."""
    make_tiny_model(directory)
    config = getattr(transformers, f"{family}Config")(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.bfloat16().save_pretrained(directory)
    return directory


@pytest.mark.parametrize(("engine", "family"), WAYS)
def test_a_family_is_sampled_as_transformers_scores_it(engine: str, family: str, tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model", family, FAMILIES[family])
    driven = Driven.of(load(engine, directory, apply="in_place"), "in_place", directory)
    assert driven.engine.layout == load_policy(directory, device="cpu").layout
    other, random = driven.base.copy(), np.random.default_rng(5)
    for span in driven.engine.layout.tensors:
        random.shuffle(other[span.start_word : span.start_word + span.words])
    for prompt in PROMPTS:
        driven.add(prompt, SAMPLING)
    for _ in range(4):
        driven.engine.step()
    driven.take(other)
    versions = set()
    for prompt, finished in driven.run_out().items():
        for completion in finished.completions:
            scores, _ = driven.recomputed(prompt, completion, SAMPLING)
            np.testing.assert_allclose(completion.behaviour_logprob, scores, atol=1e-4)
            versions |= set(completion.policy_version.tolist())
    driven.engine.close()
    assert versions == {0, 1}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_learner_scores_a_family_as_transformers_does(family: str, tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model", family, FAMILIES[family])
    policy = load_policy(directory, device="cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.randint(2, VOCABULARY_SIZE, (2, 24), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(ids.numel()).view(ids.shape)[:, :-1].flatten()
    targets = ids[:, 1:]
    scored = policy.token_logprobs(ids, positions, targets.flatten(), torch.ones(targets.numel()))
    with torch.no_grad():
        logprobs = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, targets.unsqueeze(-1)).flatten()
    torch.testing.assert_close(scored.detach(), logprobs, atol=1e-5, rtol=0)


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
