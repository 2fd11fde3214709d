"""``python -m bench.kill_lab.model DIR --seed N --frames N``: a model of many words that is computed fast.

Nearly all of its words are position embeddings, which are looked up and never multiplied: a step takes
milliseconds, and a version has some frames of a million words each to be killed among.
"""

import argparse
import string
from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    OPTConfig,
    OPTForCausalLM,
    OPTForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from bench.kill_lab.plan import TASKS
from node.kinds.registry import CAUSAL_LM

_PAD, _END = "<pad>", "<end>"
_WIDTH = 64


def make_model(directory: Path, *, seed: int, frames: int, policy: str) -> None:
    """Save a random bf16 model and its tokenizer, of one token a character where it reads text."""
    tokens = [_PAD, _END, *string.digits, "="]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=_PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_END)  # type: ignore[no-untyped-call]
    saved.save_pretrained(directory)
    config = OPTConfig(
        vocab_size=len(tokens),
        hidden_size=_WIDTH,
        word_embed_proj_dim=_WIDTH,
        ffn_dim=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=(frames << 20) // _WIDTH - 2,  # OPT adds two
        dropout=0.0,
        # So that every tensor has one name.
        tie_word_embeddings=False,
        init_std=0.08,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model_class: type[PreTrainedModel] = OPTForCausalLM
    if policy == "ranking":
        model_class, config.num_labels = OPTForSequenceClassification, 1
    torch.manual_seed(seed)
    model_class(config).bfloat16().save_pretrained(directory)


def _main() -> None:
    parser = argparse.ArgumentParser(description="Make the base model of the kill laboratory.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--frames", type=int, required=True, help="of position embeddings")
    parser.add_argument("--policy", choices=TASKS, default=CAUSAL_LM.name)
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    make_model(arguments.directory, seed=arguments.seed, frames=arguments.frames, policy=arguments.policy)


if __name__ == "__main__":
    _main()
