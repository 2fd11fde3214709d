"""A random Qwen3 of a few thousand parameters with a character vocabulary, made in a directory."""

import string
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, END = "<pad>", "<end>"
CHARACTERS = string.digits + "+-= " + string.ascii_lowercase
TOKENS = (PAD, END, *CHARACTERS)
VOCABULARY_SIZE = len(TOKENS)


def make_tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    head_size: int | None = None,
    is_tied: bool = True,
) -> Path:
    """Save a bf16 model and its tokenizer to ``directory`` and return it.

    The weights are large enough (std 0.2) that the next-token distribution is far from uniform,
    so that a wrong position, mask or stale cache shows in the logprobs.
    """
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)  # type: ignore[no-untyped-call]
    saved.save_pretrained(directory)
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_size or hidden // 4,
        max_position_embeddings=256,
        tie_word_embeddings=is_tied,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).bfloat16().save_pretrained(directory)
    return directory


def make_mixed_model(directory: Path) -> dict[str, torch.Tensor]:
    """Save such a model with some tensors in other dtypes, and give what its file holds."""
    make_tiny_model(directory, hidden=32, layers=1)
    path, random = directory / "model.safetensors", torch.Generator().manual_seed(1)
    stored = load_file(path)
    for name, dtype in {
        "model.norm.weight": torch.float32,
        "model.layers.0.input_layernorm.weight": torch.float32,
        "model.layers.0.post_attention_layernorm.weight": torch.float16,
        "model.layers.0.mlp.up_proj.weight": torch.float8_e4m3fn,
        "model.layers.0.mlp.down_proj.weight": torch.float8_e5m2,
    }.items():
        stored[name] = torch.rand(stored[name].shape, generator=random).to(dtype)
    save_file(stored, path, {"format": "pt"})
    return stored
