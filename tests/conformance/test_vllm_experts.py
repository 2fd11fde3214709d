"""Mixtures of experts in vLLM: what it computes with, files in both forms, models that it must refuse."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner.export import export_version
from learner.journal.progress import Progress
from learner.model.model import Policy, load_policy
from node.errors import StartupError
from node.values.groups.sampling_parameters import SamplingParameters
from node.weights.format.digests import Words
from sampler.engines.vllm import live_parameters
from support.checkpoints import open_checkpoints, save
from support.engines import Driven, load
from support.model_families import FAMILIES, USUAL, make_model

GREEDY = SamplingParameters(temperature=1.0, top_p=1.0, top_k=1, max_new_tokens=24)
PROMPT = "abc def ghi 12345"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", "Qwen3Moe", FAMILIES["Qwen3Moe"])


def words_of_policy(policy: Policy) -> Words:
    words = np.empty(policy.layout.words, np.uint16)
    policy.snapshot(words)
    return words


@pytest.mark.parametrize("is_apart", [True, False], ids=["apart", "together"])
def test_an_export_has_experts_in_the_form_of_the_base_model_and_is_read_by_vllm(
    is_apart: bool, model_dir: Path, tmp_path: Path
) -> None:
    if not is_apart:
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
        model.save_pretrained(model_dir, save_original_format=False)
    policy = load_policy(model_dir, device="cpu")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in policy.tensors.values():
            tensor += 0.02 * torch.randn(tensor.shape, generator=generator)
    optimizer = torch.optim.AdamW(policy.parameters.values())
    save(open_checkpoints(tmp_path / "checkpoints", policy), policy, optimizer, Progress(version=1))
    out = tmp_path / "out"
    export_version(out, state=tmp_path, model_dir=model_dir, version=1)
    base, written = load_file(model_dir / "model.safetensors"), load_file(out / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in written.items()} == {
        name: tensor.dtype for name, tensor in base.items()
    }
    assert any(".experts.0." in name for name in base) == is_apart
    driven = Driven.of(load("vllm", out), "in_place", out)
    np.testing.assert_array_equal(driven.base, words_of_policy(policy))
    driven.add(PROMPT, GREEDY, completions=1)
    drawn = driven.run_out()[PROMPT].completions[0].token_ids.tolist()
    assert drawn == driven.greedy(PROMPT, tokens=GREEDY.max_new_tokens)
    driven.engine.close()


def test_a_swap_moves_no_parameter(model_dir: Path) -> None:
    driven = Driven.of(load("vllm", model_dir), "in_place", model_dir)
    engine: Any = driven.engine
    model = engine._engine.model_executor.driver_worker.worker.model_runner.get_model()
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    driven.take(driven.base[::-1].copy())
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == addresses
    driven.engine.close()


def test_experts_that_new_words_do_not_reach_are_found_at_the_start(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_parameters, "settle_experts", lambda layer: None)
    with pytest.raises(
        StartupError, match=r"layers\.0\.mlp\.experts do not compute with words written to them"
    ):
        load("vllm", model_dir)


def test_a_model_of_which_vllm_computes_with_derived_weights_is_refused(tmp_path: Path) -> None:
    latent = {"kv_lora_rank": 32, "q_lora_rank": None}
    latent |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
    settings = USUAL | latent | {"first_k_dense_replace": 2}
    directory = make_model(tmp_path / "model", "DeepseekV2", settings)
    # By default, on a CPU with AMX, vLLM takes a backend that refuses float32 before that.
    reference = {"attention_backend": "CPU_MLA"}
    with pytest.raises(StartupError, match=r"computes with .*W_UV', which the model does not publish"):
        load("vllm", directory, extra_arguments=reference)
