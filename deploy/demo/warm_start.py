"""Makes the demo's base model: a tiny Qwen3, trained until it solves some of the task.

It starts from a seed alone. Supervised training on the answers stops as soon as the model reaches the
requested accuracy, so that reinforcement learning has something to reward and most of the way still to go.
"""

import argparse
import math
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from deploy.demo.plan import MODEL_WIDTH
from sampler.tasks.addition import AdditionTask

_PAD, _END = "<pad>", "<end>"
_ALPHABET: Final = string.digits + "+="
_LEARNING_RATE: Final = 3e-3
_STEPS: Final = 1000
"""Upper bound: ten times what any of twenty seeds needed."""
_NO_TARGET: Final = -100
"""Excluded from the loss: cross_entropy's default."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The result of a warm start."""

    accuracy: float
    """Mean over the prompts of the probability that a completion sampled at temperature 1 is right."""
    steps: int
    parameters: int


def make_base_model(directory: Path, *, accuracy: float, seed: int, width: int = MODEL_WIDTH) -> WarmStart:
    """Save a model that adds correctly with probability ``accuracy``, and its tokenizer.

    Args:
        directory: for config, generation config, bfloat16 safetensors and tokenizer.
        accuracy: in (0, 1), of the rounded weights; exceeded by at most what one step gains.
        seed: of the weights.
        width: of the hidden states, a multiple of 8; the model has 36 width^2 parameters.

    Raises:
        RuntimeError: the accuracy is not reached within the bound on steps.
    """
    tokenizer = _tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(_config(tokenizer, width))
    input_ids, target_ids = _examples(AdditionTask(), tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
    for step in range(_STEPS):
        reached = _accuracy(model, input_ids, target_ids)
        if reached >= accuracy:
            model.to(torch.bfloat16).save_pretrained(directory)  # type: ignore[arg-type]
            tokenizer.save_pretrained(directory)
            return WarmStart(reached, step, sum(p.numel() for p in model.parameters()))
        loss = cross_entropy(model(input_ids=input_ids).logits.transpose(1, 2), target_ids)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    raise RuntimeError(f"after {_STEPS} steps the base model is right {reached:.0%} of the time")


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character."""
    vocabulary = {token: number for number, token in enumerate([_PAD, _END, *_ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_END
    )


def _config(tokenizer: PreTrainedTokenizerFast, width: int) -> Qwen3Config:
    """Return the shape of a model."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.64 / math.sqrt(width),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


def _examples(task: AdditionTask, tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of all prompts, [prompts, length]; only answers and ends are targets."""
    inputs, targets = [], []
    for index in range(task.prompts):
        prompt = tokenizer(task.prompt(index, None)).input_ids
        answer = [*tokenizer(task.answer(index)).input_ids, tokenizer.eos_token_id]
        inputs.append(torch.tensor([*prompt, *answer[:-1]]))
        targets.append(torch.tensor([_NO_TARGET] * (len(prompt) - 1) + answer))
    padded_inputs = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True)
    return padded_inputs, torch.nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=_NO_TARGET)


@torch.no_grad()
def _accuracy(model: Qwen3ForCausalLM, input_ids: Tensor, target_ids: Tensor) -> float:
    """Return the mean probability of the right answer and its end, with weights rounded to bfloat16."""
    rounded = {name: tensor.bfloat16().float() for name, tensor in model.named_parameters()}
    logits = torch.func.functional_call(model, rounded, kwargs={"input_ids": input_ids}).logits
    is_target = target_ids != _NO_TARGET
    logprob = torch.log_softmax(logits, dim=-1).gather(-1, target_ids.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return float(torch.where(is_target, logprob, 0.0).sum(dim=1).exp().mean())


def _main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo's base model.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--accuracy", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--width", type=int, default=MODEL_WIDTH, help="default: %(default)s")
    arguments = parser.parse_args()
    print(
        make_base_model(
            arguments.directory, accuracy=arguments.accuracy, seed=arguments.seed, width=arguments.width
        )
    )


if __name__ == "__main__":
    _main()
