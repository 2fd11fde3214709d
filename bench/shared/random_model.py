"""Model directories with random weights: speed and bytes do not depend on what a model has learned."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SIZES: Final[Mapping[str, tuple[int, ...]]] = {
    # vocabulary, width, feed forward, layers, heads, heads of keys, width of a head
    "tiny": (1024, 64, 128, 2, 2, 1, 64),
    "33M": (49_152, 384, 1024, 8, 6, 3, 64),
    "0.5B": (151_936, 896, 4864, 24, 14, 2, 64),  # the shape of Qwen2.5-0.5B
    "0.6B": (151_936, 1024, 3072, 28, 16, 8, 128),  # Qwen3-0.6B
}
"""Name -> arguments of ``qwen3_config``."""


def qwen3_config(
    vocabulary: int, width: int, feed_forward: int, layers: int, heads: int, key_heads: int, head_width: int
) -> Qwen3Config:
    """Return the configuration of a Qwen3 whose first two tokens are padding and the end."""
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head_width,
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
    config = qwen3_config(*SIZES[size])
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
