"""Families whose logits are scaled or capped after the head: recognised, and scored a chunk at a time."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from learner.model.logit_form import PLAIN, LogitForm, logit_form
from learner.model.scorer import TokenScorer
from learner.model.sliced_loading import small_model

USUAL: Any = {
    "vocab_size": 44,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
TOKENS_ONLY: Any = {"vocab_size": 44, "bos_token_id": None, "eos_token_id": 1}
MINICPM3: Any = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}

FAMILIES: dict[str, tuple[Any, LogitForm]] = {
    "Llama": (USUAL, PLAIN),
    "GPTJ": (  # its head has a bias
        TOKENS_ONLY | {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "rotary_dim": 4},
        PLAIN,
    ),
    "Granite": (USUAL | {"logits_scaling": 7.0}, LogitForm(scale=1 / 7)),
    "Cohere": (USUAL | {"logit_scale": 0.3}, LogitForm(scale=0.3)),
    "MiniCPM3": (  # divides the hidden states before the head
        USUAL | MINICPM3 | {"num_key_value_heads": 4, "v_head_dim": 8, "dim_model_base": 8},
        LogitForm(scale=1 / 4),
    ),
    "Gemma2": (USUAL | {"head_dim": 8, "final_logit_softcapping": 2.0}, LogitForm(cap=2.0)),
    "VaultGemma": (USUAL | {"head_dim": 8, "final_logit_softcapping": None}, PLAIN),
    "RecurrentGemma": (
        USUAL | {"num_hidden_layers": 3, "lru_width": 32, "logits_soft_cap": 2.0},
        LogitForm(cap=2.0),
    ),
}

WHOLE_ONLY = {"RecurrentGemma"}
"""Families of which no single layer can be made."""


def made(family: str) -> PreTrainedModel:
    settings, _ = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**settings)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model.double()


class OddModel(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """Does with its logits what no form here does."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + torch.arange(44) / 44
        return output


def check_against_all_logits_at_once(scorer: TokenScorer) -> None:
    """Compare logprobs and all gradients with those of the softmax of the model's own logits."""
    ids = torch.arange(14).reshape(2, 7) * 3 % 44
    inputs, positions = ids[:, :-1], torch.tensor([2, 3, 5, 6, 7, 8, 11])
    target_ids = ids[:, 1:].flatten()[positions]
    temperature = torch.tensor([1.0, 1.0, 1.0, 0.7, 0.7, 0.7, 0.7], dtype=torch.float64)
    upstream = torch.linspace(-1, 2, len(positions), dtype=torch.float64)

    def with_gradients(logprob: Tensor) -> list[Tensor]:
        parameters = [one for one in scorer.model.parameters() if one.requires_grad]
        return [logprob, *torch.autograd.grad(logprob, parameters, upstream)]

    logits = scorer.model(input_ids=inputs, use_cache=False).logits.flatten(0, 1)[positions]
    expected = torch.log_softmax(logits / temperature[:, None], -1).gather(-1, target_ids[:, None])[:, 0]
    actual = scorer(inputs, positions, target_ids, temperature)
    for one, other in zip(with_gradients(actual), with_gradients(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_logprobs_and_gradients_are_those_of_its_own_logits(family: str) -> None:
    scorer = TokenScorer(made(family), compute_dtype=None, tried=None)
    assert scorer.logit_form == FAMILIES[family][1]
    check_against_all_logits_at_once(scorer)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_layer_of_a_family_shows_its_form(family: str) -> None:
    small = small_model(made(family).config)
    assert (small is None) == (family in WHOLE_ONLY)
    if small is not None:
        assert logit_form(small) == FAMILIES[family][1]


def test_a_cap_shows_however_quiet_the_weights_are() -> None:
    model = made("Gemma2")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e-3)
    assert logit_form(model) == LogitForm(cap=2.0)


def test_a_model_with_logits_of_its_own_is_asked_for_them() -> None:
    torch.manual_seed(0)
    scorer = TokenScorer(OddModel(LlamaConfig(**USUAL)).double(), compute_dtype=None, tried=None)
    assert scorer.logit_form is None
    assert "logits of whole micro-batches" in scorer.slower
    check_against_all_logits_at_once(scorer)
