"""Bytes of a contribution: by each codec, against 4 bytes a parameter in each of its steps.

    python -m bench.changes [--rate 1e-6] [--steps 16] [--rounds 8]

    tiny     a small Qwen3 that takes steps of policy gradient on random completions: the gradients of its
             matrices have some rank
    drawn    weights of 0.02 and gradients of noise, a tenth of which is the same in every step: they have
             none

AdamW of a contributor, from weights of bfloat16. A table of the last round's payload in bytes and in bits a
parameter, and how many times as much ``in_step`` sends at float32 in as many steps. Bytes are counted:
machines do not matter.
"""

import argparse
import itertools
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from bench.shared.fed_back_encoder import FedBackEncoder
from bench.shared.random_model import SIZES, qwen3_config
from learner.masters.master_words import MasterWords
from learner.merging.changes.coder import difference
from learner.merging.changes.word_changes import WordsBefore
from learner.merging.merge_settings import Compression, MergeSettings
from node.weights.format.layout import Layout, TensorSpec

COMPRESSIONS: Final[tuple[Compression, ...]] = ("full", "four_bit", "low_rank", "largest", "word_changes")
_FLOAT_BYTES: Final = 4


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    print("| model | codec | bytes | bits a parameter | times fewer |\n|---|---|---|---|---|")
    for model in ("tiny", "drawn"):
        parameters, rows = payload_bytes(model, arguments.rate, arguments.steps, arguments.rounds)
        for name, size in rows.items():
            fewer = _FLOAT_BYTES * parameters * arguments.steps / size
            print(f"| {model} {parameters} | {name} | {size} | {8 * size / parameters:.3f} | {fewer:.0f} |")


def payload_bytes(model: str, rate: float, steps: int, rounds: int) -> tuple[int, dict[Compression, int]]:
    """Return how many parameters a model has, and the bytes of the last round's payload by each codec."""
    torch.manual_seed(0)
    masters, gradients = _tiny() if model == "tiny" else _drawn()
    for master in masters.values():
        master.data.copy_(master.data.bfloat16())
    optimizer = torch.optim.AdamW(masters.values(), lr=rate)
    shapes = {name: master.shape for name, master in masters.items()}
    layout = Layout.of(TensorSpec(name, tuple(shape)) for name, shape in shapes.items())
    words = MasterWords(masters, layout)
    encoders = {name: FedBackEncoder(MergeSettings(compression=name), shapes) for name in COMPRESSIONS}
    sizes: dict[Compression, int] = {}
    for _ in range(rounds):
        anchor = {name: master.detach().clone() for name, master in masters.items()}
        frames = [words.frame(number) for number in range(len(layout.frames))]
        for _ in itertools.islice(gradients, steps):
            optimizer.step()
        changes = {name: difference(masters[name].detach(), anchor[name]) for name in masters}
        before = WordsBefore(layout, frames.__getitem__)
        for name, encoder in encoders.items():
            sizes[name] = len(encoder.encode(changes, words_before=before))
    return sum(shape.numel() for shape in shapes.values()), sizes


def _tiny() -> tuple[dict[str, Tensor], Iterator[None]]:
    """Return parameters, and what sets their gradients for each step."""
    model = Qwen3ForCausalLM(qwen3_config(*SIZES["tiny"]))

    def gradients() -> Iterator[None]:
        while True:
            tokens, advantages = torch.randint(1024, (8, 64)), torch.randn(8, 1)
            logprobs = torch.log_softmax(model(tokens[:, :-1]).logits, -1).gather(-1, tokens[:, 1:, None])
            model.zero_grad()
            loss = (-logprobs[..., 0] * advantages).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            yield

    return dict(model.named_parameters()), gradients()


def _drawn() -> tuple[dict[str, Tensor], Iterator[None]]:
    """Return parameters, and what sets their gradients for each step."""
    weights = (0.02 * torch.randn(1024, 1024)).requires_grad_()
    signal = 0.1 * torch.randn_like(weights)

    def gradients() -> Iterator[None]:
        while True:
            weights.grad = signal + torch.randn_like(weights)
            yield

    return {"weights": weights}, gradients()


if __name__ == "__main__":
    main()
