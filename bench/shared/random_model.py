"""Model directories with random weights: speed and bytes do not depend on what a model has learned."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SIZES: Final[Mapping[str, Mapping[str, Any]]] = {
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "33M": {
        "vocab_size": 49_152,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
    },
    # The shape of Qwen2.5-0.5B.
    "0.5B": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    # Qwen3-0.6B.
    "0.6B": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
"""Name -> the sizes of a Qwen3; heads have 64 channels unless they say otherwise."""


def config_of(size: str) -> Qwen3Config:
    """Return the configuration of a size in ``SIZES``."""
    return Qwen3Config(
        **{"head_dim": 64, **SIZES[size]},
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )


def made_model(directory: Path, size: str, *, device: str = "cpu") -> Path:
    """Save a random model in bfloat16, with a tokenizer whose words are numbers; return its directory.

    Args:
        device: to draw the weights on; half a billion take a CPU some seconds.
    """
    config = config_of(size)
    vocabulary = {str(number): number for number in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0", eos_token="1")  # type: ignore[no-untyped-call]
    saved.save_pretrained(directory)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).bfloat16().save_pretrained(directory)
    if device != "cpu":
        torch.cuda.empty_cache()  # the weights are gone, and others need the room
    return directory
