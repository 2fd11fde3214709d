"""A model cut into stages, in one process, and models that are not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from learner.model import sliced_loading
from learner.model.micro_batches import collate, padded, token_rows
from learner.model.step_rows import PaddedRows
from learner.ranks.shards.stages import check_stages, keep_stage, layers_of
from node.errors import StartupError
from support.made_up_groups import groups_with_replies
from support.refusals import cannot_start

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))


def gpt2() -> PreTrainedModel:
    tokens: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=3, n_head=4, **tokens))


def test_layers_are_dealt_in_runs_of_which_the_last_are_no_longer_than_the_first() -> None:
    runs = [layers_of(stage, stages=4, layers=10) for stage in range(4)]
    assert [len(run) for run in runs] == [3, 3, 2, 2]
    assert [layer for run in runs for layer in run] == list(range(10))


@pytest.mark.parametrize(
    "build", [llama, lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, layer_types=["full_attention"] * 3))]
)
def test_stages_one_after_the_other_are_the_whole_model(build: Callable[[], PreTrainedModel]) -> None:
    """Gemma 2 scales its embeddings inside of the pass that every stage runs."""
    whole = build().train(False)
    check_stages(whole, stages=3)
    ids = torch.arange(10)[None]
    given: dict[str, torch.Tensor] = {"input_ids": ids}
    names: list[set[str]] = []
    for number in range(3):
        part = build().train(False)
        part.load_state_dict(whole.state_dict())
        keep_stage(part, number, stages=3)
        names.append(set(part.state_dict()))
        given = {"inputs_embeds": part.base_model(**given, use_cache=False).last_hidden_state}
    expected = whole.base_model(input_ids=ids, use_cache=False).last_hidden_state
    assert torch.equal(given["inputs_embeds"], expected)
    assert set().union(*names) == set(whole.state_dict())
    assert names[0] & names[1] == names[1] & names[2] == set()
    assert names[0] & names[2] == {"model.embed_tokens.weight", "lm_head.weight"}  # tied


@pytest.mark.parametrize(
    ("build", "count", "said"),
    [
        (llama, 4, "pp = 4 is more than the model's 3 layers. Set pp to 3 at most"),
        (gpt2, 2, "no plan that cuts GPT2LMHeadModel into stages: no list of layers named 'layers'"),
    ],
)
def test_models_that_cannot_be_cut_are_refused_by_name(
    build: Callable[[], PreTrainedModel], count: int, said: str
) -> None:
    with pytest.raises(StartupError) as refused:
        check_stages(build(), stages=count)
    assert said in str(refused.value)


class AddsWhatTheFirstMade(torch.nn.Module):
    """A layer that uses more of an earlier one than the hidden states it passes on, as shared keys do."""

    def __init__(self, layer: torch.nn.Module, first: torch.nn.Module) -> None:
        super().__init__()
        self.layer, self.first = layer, first
        first.register_forward_hook(lambda module, _, made: setattr(module, "made", made))

    def forward(self, hidden: torch.Tensor, **named: Any) -> torch.Tensor:
        made: torch.Tensor = self.layer(hidden, **named) + vars(self.first).pop("made", 0.0)
        return made


def test_a_family_whose_layers_share_more_than_hidden_states_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sharing(*arguments: Any, **named: Any) -> PreTrainedModel | None:
        model = small(*arguments, **named)
        assert model is not None
        layers: Any = model.base_model.layers
        layers[1] = AddsWhatTheFirstMade(layers[1], layers[0])
        return model

    small = sliced_loading.small_model
    monkeypatch.setattr("learner.ranks.shards.stages.small_model", sharing)
    with cannot_start("LlamaForCausalLM", "pp"):
        check_stages(llama(), stages=2)


def test_micro_batches_for_stages_are_even_within_the_budget_and_enough() -> None:
    lengths = [len(row) for row in token_rows(groups_with_replies(0))]
    longest = max(lengths)
    for budget, parts in ((1000, 4), (2 * longest, 2), (1, 2)):
        [cut] = PaddedRows(lengths).share_out(shares=1, budget_tokens=budget, parts=parts)
        assert sorted(row for part in cut for row in part) == list(range(len(lengths)))
        assert len({len(part) for part in cut[:-1]}) <= 1
        assert len(cut) >= parts
        assert len(cut[0]) == 1 or len(cut[0]) * longest <= budget


def test_padding_moves_positions_with_their_tokens() -> None:
    part = collate(groups_with_replies(0), range(3), width=9, dtype=torch.float64, device=torch.device("cpu"))
    held, width = part.input_ids.shape
    larger = padded(part, rows=held + 2, length=width + 5)
    assert larger.input_ids.shape == (held + 2, width + 5)
    assert torch.equal(larger.input_ids.flatten()[larger.positions], part.input_ids.flatten()[part.positions])
    assert torch.equal(larger.input_ids[:held, :width], part.input_ids)
    assert larger.input_ids[held:].sum() + larger.input_ids[:, width:].sum() == 0
