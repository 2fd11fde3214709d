"""Our step against the least a step can be, on a GPU. One JSON line per step.

    python -m bench.learner.device --size 0.5B              on an H100, a minute
    python -m bench.learner.device --size tiny --device cpu     seconds

Masters are float32 and products bfloat16, in micro-batches of as many rows for all. Steps are taken in turn.

    bare          forward, all logits, log softmax, gather, a mean for a loss, backward, clipping, AdamW,
                  from tensors that lie ready; twice, which shows the noise
    ours, NAME    train_step.train_step with that objective, from groups to the step's outcome

    seconds       median over rounds, the device's work included
    over_bare     of the same round, then the median; quartiles beside it
    peak_bytes    of the device's memory, above what lay there before: all steps' parameters and moments
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.learner.steps import (
    CLIP_NORM,
    LEARNING_RATE,
    gathered_logprob,
    made_completion,
    made_group,
    make_optimizer,
    padded_ids,
)
from bench.shared.measure import ratio
from bench.shared.random_model import SIZES, config_of, made_model
from learner.config import LearnerConfig
from learner.model.model import load_policy
from learner.step.train_step import train_step
from learner.step_settings import StepSettings
from node.values.groups.rollout import Completion, RolloutGroup

OBJECTIVES: Final = ("grpo", LearnerConfig.model_fields["objective"].default)


def random_groups(arguments: argparse.Namespace) -> list[RolloutGroup]:
    """Return groups of random tokens, with the logprobs of a model that knows nothing, give or take."""
    random, vocabulary = np.random.default_rng(0), config_of(arguments.size).vocab_size

    def tokens(count: int) -> NDArray[np.int32]:
        return random.integers(2, vocabulary, count).astype(np.int32)

    def completion() -> Completion:
        logprob = -np.log(vocabulary) + random.normal(0, 0.05, arguments.completion_tokens)
        return made_completion(tokens(arguments.completion_tokens), logprob, reward=random.random())

    return [
        made_group(
            number, tokens(arguments.prompt_tokens), [completion() for _ in range(arguments.group_size)]
        )
        for number in range(arguments.groups)
    ]


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
    model_dir: Path, groups: list[RolloutGroup], arguments: argparse.Namespace, *, objective: str
) -> Callable[[], Any]:
    """Return a function that takes the learner's step."""
    config = LearnerConfig(
        model_dir=model_dir,
        learning_rate=LEARNING_RATE,
        objective=objective,
        gradient_clip_norm=CLIP_NORM,
        micro_batch_tokens=arguments.micro_batch_tokens,
    )
    policy = load_policy(model_dir, device=arguments.device, compute_dtype=torch.bfloat16)
    optimizer = make_optimizer(policy.model)
    settings = StepSettings.of(config)

    def step() -> None:
        outcome = train_step(policy, optimizer, groups, version=0, settings=settings)
        assert outcome.is_applied, outcome

    return step


def measure(model_dir: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a line for each step."""
    groups = random_groups(arguments)
    bare = bare_step(model_dir, groups, arguments)
    steps = {"bare": bare, "bare, again": bare}
    for objective in OBJECTIVES:
        steps[f"ours, {objective}"] = our_step(model_dir, groups, arguments, objective=objective)
    took: dict[str, list[float]] = {name: [] for name in steps}
    peaks: dict[str, int] = {}
    for number in range(arguments.rounds + 1):
        for name in (*list(steps)[number % len(steps) :], *list(steps)[: number % len(steps)]):
            seconds, peak = _timed(steps[name], torch.device(arguments.device))
            if number:  # the first makes moments, and compiles
                took[name].append(seconds)
                peaks[name] = peak
    tokens = arguments.groups * arguments.group_size * arguments.completion_tokens
    lines = []
    for name, seconds_each in took.items():
        over_bare, quartiles = ratio(seconds_each, took["bare"])
        seconds = statistics.median(seconds_each)
        lines.append(
            {
                "step": name,
                "size": arguments.size,
                "tokens": tokens,
                "rounds": arguments.rounds,
                "seconds": round(seconds, 4),
                "tokens_per_s": round(tokens / seconds),
                "over_bare": over_bare,
                "over_bare_quartiles": quartiles,
                "peak_bytes": peaks[name],
            }
        )
    return lines


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
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as directory:
        made = made_model(Path(directory), arguments.size, device=arguments.device)
        for line in measure(made, arguments):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
