"""Tiny models that rank."""

from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel, Qwen3Config
from transformers import Qwen3ForSequenceClassification as Qwen3Ranker

from support.tiny_model import VOCABULARY_SIZE, make_tiny_model

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 48,
    "num_labels": 1,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def make_ranker(directory: Path, *, family: str = "Qwen3", seed: int = 0) -> Path:
    """Save a bf16 model that ranks, with the tokenizer of ``make_tiny_model``, and return its directory."""
    make_tiny_model(directory, hidden=16, layers=1)
    (directory / "generation_config.json").unlink(missing_ok=True)
    model: PreTrainedModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if family == "Bert":
            model = BertForSequenceClassification(BertConfig(**_SIZES))
        else:
            model = Qwen3Ranker(Qwen3Config(**_SIZES, num_key_value_heads=2, head_dim=8))  # type: ignore[no-untyped-call]
        model.bfloat16().save_pretrained(directory)
    return directory
