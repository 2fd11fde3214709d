"""Packs against rows, for every family that reads them; and models that would be wrong with them."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from learner.model.micro_batches import collate
from learner.model.model import Policy, ScoringModel
from learner.model.packed_families import FAMILIES, adopt_packs
from learner.model.scorer import TokenScorer
from support.float64 import StaysWide
from support.made_up_groups import groups_with_replies

CPU = torch.device("cpu")
ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
USUAL: dict[str, Any] = ENDS | {
    "vocab_size": 44,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
WINDOW = {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("mistral", "ministral", "qwen2", "qwen3", "smollm3", "starcoder2", "phi3"), WINDOW),
    **dict.fromkeys(("gemma3_text", "olmo3", "cohere2", "exaone4"), WINDOW),
    **dict.fromkeys(("gemma2", "vaultgemma"), WINDOW | {"attn_logit_softcapping": 0.5}),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"), EXPERTS | WINDOW),
    **dict.fromkeys(("olmoe", "granitemoe", "granitemoeshared", "phimoe"), EXPERTS),
    "glm4_moe": EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
}


def made(family: str, **changes: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(family, **USUAL | SETTINGS.get(family, {}) | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.set_experts_implementation("eager")  # others have no float64
    model.double().train(False)
    return model


def scored(scorer: TokenScorer, *, packed: bool) -> tuple[Tensor, Tensor]:
    """Return the logprobs of groups with replies, and the gradient of a weighed sum of them."""
    groups = groups_with_replies(3)
    rows = range(sum(len(group.completions) for group in groups))
    part = collate(groups, rows, width=9, dtype=torch.float64, device=CPU, packed=packed)
    with StaysWide():
        logprob = scorer(part.input_ids, *part.asked)
    weights = torch.randn(logprob.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(
        (logprob * weights).sum(), list(scorer.parameters()), materialize_grads=True
    )
    return logprob.detach(), torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logprobs_and_gradients_of_a_pack_are_those_of_its_rows(family: str) -> None:
    scorer = TokenScorer(made(family), compute_dtype=None, tried=None)
    assert scorer.reads_packs
    (found, gradient), (expected, right) = (scored(scorer, packed=packed) for packed in (True, False))
    assert expected.std() > 0.03
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(gradient, right, rtol=1e-9, atol=1e-9 * float(right.abs().max()))


@pytest.mark.parametrize("family", ["nemotron", "lfm2", "stablelm"])
def test_another_family_goes_row_by_row(family: str) -> None:
    scorer = TokenScorer(made(family), compute_dtype=None, tried=None)
    assert not scorer.reads_packs
    assert [why for what, why in scorer.slower.items() if "row by row" in what]
    assert not scorer.step_rows(groups_with_replies(3), packing="prefixes").is_packed


def test_the_log_says_once_in_a_process_that_its_model_goes_row_by_row(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        Policy(made("stablelm"))
        ScoringModel(made("stablelm"))
    [said] = [record for record in caplog.records if "row by row" in record.message]
    assert said.__dict__["family"] == "stablelm"


Keywords = dict[str, Any]


def spoil(model: PreTrainedModel, change: Callable[[Keywords, int], Keywords]) -> None:
    """Let a model's layers get other keywords than it is called with, by the length of the row."""

    def changed(_: object, arguments: Any, named: Keywords) -> Any:
        length = (arguments[0] if arguments else named["input_ids"]).shape[1]
        return arguments, change(named, length)

    model.base_model.register_forward_pre_hook(changed, with_kwargs=True)


def positions_of_its_own(named: Keywords, _: int) -> Keywords:
    return {name: value for name, value in named.items() if name != "position_ids"}


def a_mask_of_its_own(named: Keywords, length: int) -> Keywords:
    return named | {"attention_mask": torch.ones(length, length, dtype=torch.bool).tril()[None, None]}


def nothing_it_does_not_know(named: Keywords, _: int) -> Keywords:
    return {name: value for name, value in named.items() if name != "pack"}


@pytest.mark.parametrize("change", [positions_of_its_own, a_mask_of_its_own, nothing_it_does_not_know])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_that_would_be_wrong_with_packs_goes_row_by_row(
    family: str, change: Callable[[Keywords, int], Keywords]
) -> None:
    model = made(family)
    before, _ = scored(TokenScorer(made(family), compute_dtype=None, tried=None), packed=False)
    spoil(model, change)
    assert adopt_packs(model, tried=None)
    scorer = TokenScorer(model, compute_dtype=None, tried=None)
    assert not scorer.reads_packs
    torch.testing.assert_close(scored(scorer, packed=False)[0], before, rtol=0, atol=0)


@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}])
def test_positions_that_depend_on_the_longest_row_keep_a_model_from_packs(rope: dict[str, Any]) -> None:
    assert adopt_packs(made("llama", rope_parameters=rope), tried=None)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss"])
def test_rows_of_a_model_that_reads_packs_are_computed_as_ever_to_the_bit(family: str) -> None:
    plain, packing = made(family), made(family)
    assert adopt_packs(packing, tried=None) is None
    ids = torch.arange(24).view(2, 12) % 44
    assert torch.equal(plain(input_ids=ids).logits, packing(input_ids=ids).logits)
