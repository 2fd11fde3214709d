"""Our step against the least a step can be, on a GPU. One JSON line per step.

    python -m bench.learner.device --size 0.5B              on an H100, a minute
    python -m bench.learner.device --size tiny --device cpu     seconds

Masters are float32 and products bfloat16, in micro-batches of as many rows for all. Steps are taken in turn.

    bare          forward, all logits, log softmax, gather, a mean for a loss, backward, clipping, AdamW,
                  from tensors that lie ready; twice, which shows the noise. Not where lengths differ
    ours, NAME    train_step.train_step with that objective, from groups to the step's outcome
    ours, padded  likewise, with every completion a padded row

    rows          how many, and the tokens of their longest prompt and completion
    seconds       median over rounds, the device's work included
    over_bare     of the same round, then the median; quartiles beside it. over_padded likewise
    positions_over_distinct   as bench.learner has it
    peak_bytes    of the device's memory, above what lay there before: all steps' parameters and moments
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import AutoModelForCausalLM

from bench.learner.steps import (
    OURS,
    Bare,
    Ours,
    Shape,
    Step,
    completion_tokens,
    distinct_positions,
    make_groups,
    padded_ids,
    positions_read,
)
from bench.shared.measure import in_turns, over
from bench.shared.random_model import SIZES, made_model
from learner.config import Rematerialise
from learner.model.model import load_policy


def measure(model_dir: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Return a line for each step."""
    shape, device = _shape(arguments), torch.device(arguments.device)
    groups = make_groups(shape)
    policy = load_policy(
        model_dir,
        device=arguments.device,
        compute_dtype=torch.bfloat16,
        rematerialise=arguments.rematerialise,
    )
    most = arguments.micro_batch_tokens
    steps: dict[str, Step] = {
        name: Ours(policy, groups, micro_batch_tokens=most, **OURS[name])
        for name in arguments.only or OURS
        if name in OURS
    }
    positions = {name: positions_read(step) for name, step in steps.items()}
    if not arguments.only and shape.least_tokens is None:
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, trust_remote_code=False
        )
        bare = Bare(
            model.to(device),
            padded_ids(groups).to(device),
            prompt_tokens=shape.prompt_tokens,
            rows=max(1, most // (shape.prompt_tokens + shape.completion_tokens)),
            dtype=torch.bfloat16,
        )
        steps = {"bare": bare, "bare, again": bare, **steps}
    in_turns(steps, 1, partial(_timed, device))  # makes moments, and compiles
    told = in_turns(steps, arguments.rounds, partial(_timed, device))
    took = {name: [seconds for seconds, _ in each] for name, each in told.items()}
    tokens, distinct = completion_tokens(groups), distinct_positions(groups)
    for name, seconds_each in took.items():
        line = {
            "step": name,
            "size": arguments.size,
            "rows": [shape.rows, shape.prompt_tokens, shape.completion_tokens],
            "tokens": tokens,
            "rounds": arguments.rounds,
            "seconds": round(statistics.median(seconds_each), 4),
            "tokens_per_s": round(tokens / statistics.median(seconds_each)),
            "peak_bytes": told[name][-1][1],
        }
        if name in positions:
            line["positions_over_distinct"] = round(positions[name] / distinct, 3)
        line |= over(took, name, "bare", "over_bare")
        yield line | over(took, name, "ours, padded", "over_padded")


def _shape(arguments: argparse.Namespace) -> Shape:
    vocabulary, width, _, layers, *_ = SIZES[arguments.size]
    return Shape(
        arguments.size,
        vocabulary,
        width,
        layers,
        arguments.groups,
        arguments.group_size,
        arguments.prompt_tokens,
        arguments.completion_tokens,
        arguments.rounds,
        least_tokens=arguments.least_tokens and tuple(arguments.least_tokens),
    )


def _timed(device: torch.device, step: Callable[[], object]) -> tuple[float, int]:
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    step()
    if is_cuda:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    return seconds, torch.cuda.max_memory_allocated(device) - before if is_cuda else 0


def main(given: Sequence[str] | None = None) -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.learner.device", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--size", choices=SIZES, default="0.5B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--completion-tokens", type=int, default=256)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--least-tokens", type=int, nargs=2, help="of a prompt and of a completion")
    parser.add_argument("--rematerialise", choices=get_args(Rematerialise), default="none")
    parser.add_argument("--only", nargs="+", help="steps of ours; without it all of them, and bare")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as directory:
        made = made_model(Path(directory), arguments.size, device=arguments.device)
        for line in measure(made, arguments):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
