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
from pathlib import Path
from typing import Any, Final, get_args

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.learner.steps import (
    CLIP_NORM,
    LEARNING_RATE,
    Shape,
    completion_tokens,
    distinct_positions,
    gathered_logprob,
    make_groups,
    make_optimizer,
    padded_ids,
    positions_read,
)
from bench.shared.measure import ratio
from bench.shared.random_model import SIZES, config_of, made_model
from learner.config import LearnerConfig, Rematerialise
from learner.model.model import Policy, load_policy
from learner.step.train_step import train_step
from learner.step_settings import StepSettings
from node.values.groups.rollout import RolloutGroup

OBJECTIVES: Final = ("grpo", LearnerConfig.model_fields["objective"].default)


def bare_step(
    model_dir: Path, groups: list[RolloutGroup], arguments: argparse.Namespace
) -> Callable[[], Any]:
    """Return a function that takes the least of a step."""
    device = arguments.device
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, trust_remote_code=False
    ).to(device)
    optimizer = make_optimizer(model)
    rows = max(1, arguments.micro_batch_tokens // (arguments.prompt_tokens + arguments.completion_tokens))
    parts: tuple[Tensor, ...] = torch.split(padded_ids(groups).to(device), rows)
    total = sum(len(part) for part in parts) * arguments.completion_tokens

    def step() -> None:
        for part in parts:
            with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
                logprob = gathered_logprob(model, part)
            (-logprob[:, arguments.prompt_tokens - 1 :].sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def our_step(
    policy: Policy, groups: list[RolloutGroup], arguments: argparse.Namespace, **chosen: Any
) -> Callable[[], Any]:
    """Return a function that takes the learner's step with these settings of it."""
    config = LearnerConfig(
        model_dir=Path(),
        learning_rate=LEARNING_RATE,
        gradient_clip_norm=CLIP_NORM,
        micro_batch_tokens=arguments.micro_batch_tokens,
        **chosen,
    )
    optimizer = make_optimizer(policy.model)
    settings = StepSettings.of(config)

    def step() -> None:
        outcome = train_step(policy, optimizer, groups, version=0, settings=settings)
        assert outcome.is_applied, outcome

    return step


def measure(model_dir: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Return a line for each step."""
    shape = _shape(arguments)
    groups = make_groups(shape)
    policy = load_policy(
        model_dir,
        device=arguments.device,
        compute_dtype=torch.bfloat16,
        rematerialise=arguments.rematerialise,
    )
    ours: dict[str, dict[str, Any]] = {f"ours, {name}": {"objective": name} for name in OBJECTIVES}
    ours["ours, padded"] = {"objective": OBJECTIVES[0], "packing": "none"}
    steps = {name: our_step(policy, groups, arguments, **chosen) for name, chosen in ours.items()}
    if arguments.only:
        steps = {name: steps[name] for name in arguments.only if name in steps}
    elif shape.least_tokens is None:
        bare = bare_step(model_dir, groups, arguments)
        steps = {"bare": bare, "bare, again": bare, **steps}
    positions = {name: positions_read(policy.model, step) for name, step in steps.items() if name in ours}
    took: dict[str, list[float]] = {name: [] for name in steps}
    peaks: dict[str, int] = {}
    for number in range(arguments.rounds + 1):
        for name in (*list(steps)[number % len(steps) :], *list(steps)[: number % len(steps)]):
            seconds, peak = _timed(steps[name], torch.device(arguments.device))
            if number:  # the first makes moments, and compiles
                took[name].append(seconds)
                peaks[name] = peak
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
            "peak_bytes": peaks[name],
        }
        if name in ours:
            line["positions_over_distinct"] = round(positions[name] / distinct, 3)
        for key, other in (("over_bare", "bare"), ("over_padded", "ours, padded")):
            if other in took:
                line[key], line[f"{key}_quartiles"] = ratio(seconds_each, took[other])
        yield line


def _shape(arguments: argparse.Namespace) -> Shape:
    config = config_of(arguments.size)
    return Shape(
        arguments.size,
        config.vocab_size,
        config.hidden_size,
        config.num_hidden_layers,
        arguments.groups,
        arguments.group_size,
        arguments.prompt_tokens,
        arguments.completion_tokens,
        arguments.rounds,
        least_tokens=arguments.least_tokens and tuple(arguments.least_tokens),
    )


def _timed(step: Callable[[], Any], device: torch.device) -> tuple[float, int]:
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
