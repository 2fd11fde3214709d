"""How fast completions are generated through us, beside the bare engine. One JSON line per contestant.

    python -m bench.sampler                 a random model of 33 million parameters: six minutes
    python -m bench.sampler --model DIR     one of your own
    python -m bench.sampler --size 0.5B --device cuda --dtype bfloat16   half a billion, on a GPU
    python -m bench.sampler --groups 32 64 --new-tokens 256 24           two loads, one after the other

    transformers, torch   transformers' own generate; the torch engine, stepped in a thread as in a sampler.
                          One process, in turns, so that both meet the same disturbances
    vllm bare, vllm       vLLM's own generate; the vllm engine. A process each; if installed
    vllm own              the vllm engine with sampler.engine_process = "own"
    torch keep, ...       what versions cost where caches are kept, not computed again

    rows, new_tokens      the load
    tokens_per_s          of all rows together, by the clock; median over rounds
    tokens_per_core_s     by the processor time of the process and of its engine's, which others can hardly
                          lengthen
    over_bare             tokens_per_s over the bare engine's: of the same round, then the median; for vllm
                          of the medians
    core_over_bare        likewise of tokens_per_core_s
    lost_share            of the time between versions, one every ``--every`` seconds: by how much longer
                          the same tokens took than without versions, by the clock. The words were at hand
    lost_core_share       likewise by the processor time, as a share of all ``--threads``
    swap_s                mean time of handing a version over between two steps
    longest_turn_s        from a step's end to the next one's, the longest; longest_alone_s without versions
    load                  processes that wanted to run, a minute's mean: above the cores, others slowed this

The prompts of a group are equal, and all have the same length. Every contestant draws at temperature 1 from
the whole vocabulary. On a CPU vLLM runs without compilation, bare and through us.
"""

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch

from bench.sampler.contestants import BareVllm, Contestant, Load, Ours, Round, Transformers
from bench.shared.measure import CORES
from bench.shared.random_model import SIZES, made_model

PROCESSES: Final = {
    "torch": ("transformers", "torch"),
    "vllm bare": ("vllm bare",),
    "vllm": ("vllm",),
    "vllm own": ("vllm own",),
}
"""Which contestants share a process."""

OVER: Final = {"tokens_per_s": "over_bare", "tokens_per_core_s": "core_over_bare"}

KV_CACHES: Final = ("recompute", "keep")


def measure(
    names: Sequence[str], loads: Sequence[Load], *, rounds: int, versions: int, every_s: float
) -> None:
    """Print a line for each contestant under each load."""
    largest = replace(
        loads[0], groups=max(load.groups for load in loads), new_tokens=max(load.new_tokens for load in loads)
    )
    with ThreadPoolExecutor(1) as thread:
        contestants = {name: _contestant(name, largest, thread) for name in names}
        for load in loads:
            for contestant in contestants.values():
                contestant.load = load
                contestant.generate()
            turns = [{name: _turn(one) for name, one in contestants.items()} for _ in range(rounds)]
            for name, contestant in contestants.items():
                line: dict[str, Any] = {"case": name, "rows": load.rows, "new_tokens": load.new_tokens}
                line["load"] = round(os.getloadavg()[0], 1)
                for figure in ("tokens_per_s", "tokens_per_core_s"):
                    line[figure] = _median(getattr(turn[name], figure) for turn in turns)
                    if name != names[0]:
                        over = (getattr(t[name], figure) / getattr(t[names[0]], figure) for t in turns)
                        line[OVER[figure]] = _median(over)
                if isinstance(contestant, Ours):
                    line |= contestant.lost(versions=versions, every_s=every_s)
                    line |= {"every_s": every_s, "kv_cache": load.kv_cache}
                print(json.dumps(line), flush=True)


def _contestant(name: str, load: Load, thread: ThreadPoolExecutor) -> Contestant:
    match name:
        case "transformers":
            return Transformers(load)
        case "vllm bare":
            return BareVllm(load)
        case _:
            return Ours(load, name, thread)


def _turn(contestant: Contestant) -> Round:
    began, processor = time.perf_counter(), contestant.processor_s()
    tokens = contestant.generate()
    return Round(tokens, time.perf_counter() - began, contestant.processor_s() - processor)


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 4)


def main() -> None:
    """Measure the engines that are installed, each group of contestants in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a model directory; without it one is made")
    parser.add_argument("--size", choices=SIZES, default="33M", help="of the model that is made")
    parser.add_argument(
        "--engines", nargs="+", choices=PROCESSES, help="what to measure; without it all there are"
    )
    parser.add_argument("--groups", type=int, nargs="+", default=[8], help="of each load")
    parser.add_argument("--completions", type=int, default=8, help="rows are groups times completions")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[128], help="of each load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--versions", type=int, default=2)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between versions")
    parser.add_argument("--kv-cache", choices=KV_CACHES, help="at a new version; without it each in turn")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=CORES)
    arguments = parser.parse_args()
    if arguments.model is None:
        with tempfile.TemporaryDirectory() as directory:
            model_dir = made_model(Path(directory), arguments.size, device=arguments.device)
            _again("--model", str(model_dir))
        return
    if arguments.kv_cache is None or arguments.engines is None or len(arguments.engines) > 1:
        there = [name for name in PROCESSES if "vllm" not in name or importlib.util.find_spec("vllm")]
        kv_caches = KV_CACHES if arguments.kv_cache is None else (arguments.kv_cache,)
        _measure_each(arguments.engines or there, kv_caches)
        return
    torch.set_num_threads(arguments.threads)
    loads = [
        Load(
            arguments.model,
            groups=groups,
            completions=arguments.completions,
            prompt_tokens=arguments.prompt_tokens,
            new_tokens=new_tokens,
            device=arguments.device,
            compute_dtype=arguments.dtype,
            threads=arguments.threads,
            kv_cache=arguments.kv_cache,
        )
        for groups, new_tokens in zip(arguments.groups, arguments.new_tokens, strict=True)
    ]
    names = PROCESSES[arguments.engines[0]]
    measure(names, loads, rounds=arguments.rounds, versions=arguments.versions, every_s=arguments.every)


def _again(*more: str, stdout: int | None = None) -> str:
    """Run this command with more arguments in a process of its own; return what it printed, if asked for."""
    command = [sys.executable, "-m", "bench.sampler", *sys.argv[1:], *more]
    return subprocess.run(command, check=True, stdout=stdout, text=True).stdout


def _measure_each(names: Iterable[str], kv_caches: Sequence[str]) -> None:
    """Print every line as it comes, vLLM's beside bare vLLM's of the same load."""
    bare: dict[int, dict[str, Any]] = {}
    for name, kv_cache in product(names, kv_caches):
        is_first = kv_cache == kv_caches[0]
        if not is_first and name == "vllm bare":
            continue
        printed = _again("--engines", name, "--kv-cache", kv_cache, stdout=subprocess.PIPE)
        # vLLM logs to standard output as well.
        for line in map(json.loads, re.findall(r"^{.*}$", printed, re.M)):
            rows = line["rows"]
            if name == "vllm bare":
                bare[rows] = line
            elif name.startswith("vllm") and rows in bare:
                line |= {over: round(line[figure] / bare[rows][figure], 4) for figure, over in OVER.items()}
            if is_first or "lost_share" in line:
                line["case"] += "" if is_first else f" {kv_cache}"
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
