"""How fast completions are generated through us, beside the bare engine. One JSON line per contestant.

    python -m bench.sampler                 a random model of 33 million parameters: two minutes
    python -m bench.sampler --model DIR     one of your own

    transformers, torch   transformers' own generate; the torch engine, stepped in a thread as in a sampler.
                          One process, in turns, so that both meet the same disturbances
    vllm bare, vllm       vLLM's own generate; the vllm engine. A process each; if installed

    tokens_per_s          of all rows together, by the clock; median over rounds
    tokens_per_core_s     by the processor time of the process, which others can hardly lengthen
    over_bare             tokens_per_s over the bare engine's: of the same round, then the median; for vllm
                          of the medians
    core_over_bare        likewise of tokens_per_core_s
    lost_share            of the time between versions, one every ``--every`` seconds: by how much longer
                          the same tokens took than without versions, by the clock. The words were at hand:
                          what staging costs is bench/swap.py's
    lost_core_share       likewise by the processor time of the process, as a share of all ``--threads``
    swap_s                mean time of handing a version over between two steps
    longest_turn_s        from a step's end to the next one's, the longest; longest_alone_s without versions
    apart_nats            between behaviour logprob and the learner's, float32: mean of absolute differences
    farthest_nats         the largest
    load                  processes that wanted to run, a minute's mean: above the cores, others slowed this

The prompts of a group are equal, and all have the same length. Every contestant draws at temperature 1 from
the whole vocabulary. On a CPU vLLM runs without compilation, bare and through us.
"""

import argparse
import importlib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from bench.measure import CORES
from bench.swap import SIZES, made_model
from learner.training.model import load_policy
from node.rollout import SamplingParameters
from sampler.config import SamplerConfig
from sampler.engines.engine import FinishedRequest, GenerationRequest
from sampler.engines.engine_registry import load_engine
from sampler.engines.model_words import ArrayWords, copy_words

T = TypeVar("T")

PROCESSES: Final = {"torch": ("transformers", "torch"), "vllm bare": ("vllm bare",), "vllm": ("vllm",)}
"""Which contestants share a process."""


@dataclass(frozen=True, slots=True)
class Load:
    """What every contestant generates, and with what."""

    model_dir: Path
    groups: int
    completions: int
    prompt_tokens: int
    new_tokens: int
    device: str
    compute_dtype: str
    threads: int
    kv_cache: str

    @property
    def memory_share(self) -> float:
        """Of vLLM: on a CPU, which others use as well, half."""
        return 0.5 if self.device == "cpu" else 0.9

    @property
    def sampling(self) -> SamplingParameters:
        return SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=self.new_tokens)

    def prompts(self) -> list[NDArray[np.int32]]:
        random = np.random.default_rng(0)
        return list(random.integers(2, 1000, (self.groups, self.prompt_tokens)).astype(np.int32))


@dataclass(frozen=True, slots=True)
class Round:
    """One contestant's turn."""

    tokens: int
    seconds: float
    core_seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_core_s(self) -> float:
        return self.tokens / self.core_seconds


@dataclass(frozen=True, slots=True)
class Stream:
    """Groups generated one after the other, with versions in between."""

    round: Round
    groups: int
    change_s: float
    """Of all versions together."""
    longest_turn_s: float


class Contestant(Protocol):
    """Something that generates."""

    def generate(self) -> int:
        """Complete every prompt; return the tokens drawn."""
        ...


class Transformers:
    """transformers' generate, every completion a row."""

    def __init__(self, load: Load) -> None:
        self._load = load
        dtype = getattr(torch, load.compute_dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(load.model_dir, dtype=dtype)
        self._model = model.to(load.device)
        ends = self._model.generation_config.eos_token_id
        self._end_ids = torch.tensor([] if ends is None else ends, device=load.device)
        self._ids = torch.tensor(
            np.repeat(load.prompts(), load.completions, axis=0), device=load.device
        ).long()

    def generate(self) -> int:
        drawn = self._model.generate(
            self._ids,
            attention_mask=torch.ones_like(self._ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self._load.new_tokens,
            pad_token_id=0,
        )[:, self._ids.shape[1] :]
        ended = torch.isin(drawn, self._end_ids).int()
        # The end token counts; what follows it is padding.
        return int((ended.cumsum(dim=-1) - ended == 0).sum())


class BareVllm:
    """vLLM's generate, in process."""

    def __init__(self, load: Load) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        self._vllm: Any = importlib.import_module("vllm")
        self._load = load
        self._engine = self._vllm.LLM(
            model=str(load.model_dir),
            dtype=load.compute_dtype,
            max_model_len=load.prompt_tokens + load.new_tokens,
            max_num_seqs=load.groups * load.completions,
            **({"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30} if load.device == "cpu" else {}),
            gpu_memory_utilization=load.memory_share,
        )

    def generate(self) -> int:
        sampling = self._vllm.SamplingParams(
            n=self._load.completions,
            temperature=1.0,
            max_tokens=self._load.new_tokens,
            logprobs=0,
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": prompt.tolist()} for prompt in self._load.prompts()]
        outputs = self._engine.generate(prompts, sampling, use_tqdm=False)
        return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)


class Ours:
    """An engine of the sampler, each step a task of its thread, as a sampler drives it."""

    def __init__(self, load: Load, engine: str, thread: ThreadPoolExecutor) -> None:
        self._load = load
        self._thread = thread
        self._has_spare = engine == "torch"
        settings = SamplerConfig.model_validate(
            {
                "model_dir": load.model_dir,
                "engine": engine,
                "device": load.device,
                "compute_dtype": load.compute_dtype,
                "apply": "spare" if self._has_spare else "in_place",
                "threads": load.threads,
                "seed": 0,
                "engine_options": {"kv_cache": load.kv_cache}
                | ({} if self._has_spare else {"memory_share": load.memory_share}),
            }
        )
        self._engine = self._call(lambda: load_engine(settings.engine, settings))
        self._version = 0

    def generate(self) -> int:
        return sum(len(c.token_ids) for group in self.groups() for c in group.completions)

    def groups(self) -> list[FinishedRequest]:
        """Complete every prompt."""
        for number in range(self._load.groups):
            self._add(number)
        finished: list[FinishedRequest] = []
        while len(finished) < self._load.groups:
            finished += self._call(self._engine.step)
        return finished

    def lost(self, *, versions: int, every_s: float) -> dict[str, float]:
        """Measure what versions cost, against as many groups without them."""
        through = self._stream(self._call(self._changing), versions=versions, every_s=every_s, groups=0)
        alone = self._stream(lambda: None, versions=0, every_s=every_s, groups=through.groups)
        lost_s = through.round.seconds - through.round.tokens / alone.round.tokens_per_s
        lost_core_s = through.round.core_seconds - through.round.tokens / alone.round.tokens_per_core_s
        between_s = versions * every_s
        return {
            "lost_share": round(lost_s / between_s, 4),
            "lost_core_share": round(lost_core_s / between_s / self._load.threads, 4),
            "swap_s": round(through.change_s / versions, 4),
            "longest_turn_s": round(through.longest_turn_s, 4),
            "longest_alone_s": round(alone.longest_turn_s, 4),
        }

    def _stream(self, change: Callable[[], None], *, versions: int, every_s: float, groups: int) -> Stream:
        """Keep every row busy until ``versions`` were taken and ``groups`` added; then finish these."""
        for number in range(self._load.groups):
            self._add(number)
        added = running = self._load.groups
        made, tokens, change_s, longest_turn_s = 0, 0, 0.0, 0.0
        began, processor = time.perf_counter(), time.process_time()
        while running:
            turn_began = time.perf_counter()
            if made < versions and turn_began >= began + (made + 1) * every_s:
                self._call(change)
                made += 1
                change_s += time.perf_counter() - turn_began
            for finished in self._call(self._engine.step):
                tokens += sum(len(completion.token_ids) for completion in finished.completions)
                running -= 1
                if made < versions or added < groups:
                    self._add(int(finished.request_id))
                    added, running = added + 1, running + 1
            longest_turn_s = max(longest_turn_s, time.perf_counter() - turn_began)
        taken = Round(tokens, time.perf_counter() - began, time.process_time() - processor)
        return Stream(taken, added, change_s, longest_turn_s)

    def _changing(self) -> Callable[[], None]:
        """Return what puts the words that are there in place once more, as those of another version."""
        weights, layout = self._engine.weights, self._engine.layout
        words = ArrayWords(np.concatenate([weights.live.read(frame) for frame in layout.frames]))
        spares = weights.spares if self._has_spare else None
        spare = spares and spares.new_spare()
        if spare:
            copy_words(words, spare, layout=layout)

        def change() -> None:
            nonlocal spare
            if spares and spare:
                spare = spares.swap(spare)
            else:
                copy_words(words, weights.live, layout=layout)
                weights.settle()
            self._version += 1
            self._engine.serve(self._version)

        return change

    def _add(self, number: int) -> None:
        load = self._load
        request = GenerationRequest(str(number), load.prompts()[number], load.completions, load.sampling)
        self._call(lambda: self._engine.add(request))

    def _call(self, call: Callable[[], T]) -> T:
        return self._thread.submit(call).result()


def apart(load: Load, groups: Sequence[FinishedRequest]) -> dict[str, float]:
    """Compare behaviour logprobs with the learner's."""
    policy, prompts = load_policy(load.model_dir, device=load.device), load.prompts()
    differences = []
    for group in groups:
        prompt = prompts[int(group.request_id)]
        for completion in group.completions:
            tokens = torch.tensor(np.concatenate([prompt, completion.token_ids]), device=load.device).long()
            with torch.no_grad():
                learner = policy.token_logprobs(
                    tokens[None, :-1],
                    torch.arange(len(prompt) - 1, len(tokens) - 1, device=load.device),
                    tokens[len(prompt) :],
                    torch.ones(len(completion.token_ids), device=load.device),
                )
            differences.append(np.abs(completion.behaviour_logprob - learner.cpu().numpy()))
    every = np.concatenate(differences)
    return {"apart_nats": float(every.mean()), "farthest_nats": float(every.max())}


def measure(names: Sequence[str], load: Load, *, rounds: int, versions: int, every_s: float) -> None:
    """Print a line for each contestant."""
    with ThreadPoolExecutor(1) as thread:
        contestants = {name: _contestant(name, load, thread) for name in names}
        for contestant in contestants.values():
            contestant.generate()
        turns = [{name: _turn(one) for name, one in contestants.items()} for _ in range(rounds)]
        for name, contestant in contestants.items():
            line: dict[str, Any] = {"case": name, "load": round(os.getloadavg()[0], 1)}
            for figure in ("tokens_per_s", "tokens_per_core_s"):
                line[figure] = _median(getattr(turn[name], figure) for turn in turns)
            if name != names[0]:
                line["over_bare"] = _median(t[name].tokens_per_s / t[names[0]].tokens_per_s for t in turns)
                line["core_over_bare"] = _median(
                    t[name].tokens_per_core_s / t[names[0]].tokens_per_core_s for t in turns
                )
            if isinstance(contestant, Ours):
                line |= apart(load, contestant.groups()[:2])
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
    began, processor = time.perf_counter(), time.process_time()
    tokens = contestant.generate()
    return Round(tokens, time.perf_counter() - began, time.process_time() - processor)


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 4)


def main() -> None:
    """Measure the engines that are installed, each group of contestants in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a model directory; without it one is made")
    parser.add_argument(
        "--engines", nargs="+", choices=PROCESSES, help="what to measure; without it all there are"
    )
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--completions", type=int, default=8, help="rows are groups times completions")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--versions", type=int, default=2)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between versions")
    parser.add_argument("--kv-cache", default="recompute", choices=["recompute", "keep"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=CORES)
    arguments = parser.parse_args()
    if arguments.model is None:
        with tempfile.TemporaryDirectory() as directory:
            model_dir = made_model(Path(directory), SIZES["small"])
            again = [sys.executable, "-m", "bench.sampler", *sys.argv[1:], "--model", str(model_dir)]
            sys.exit(subprocess.run(again).returncode)
    if arguments.engines is None or len(arguments.engines) > 1:
        there = [name for name in PROCESSES if "vllm" not in name or importlib.util.find_spec("vllm")]
        _measure_each(arguments.engines or there)
        return
    torch.set_num_threads(arguments.threads)
    load = Load(
        arguments.model,
        groups=arguments.groups,
        completions=arguments.completions,
        prompt_tokens=arguments.prompt_tokens,
        new_tokens=arguments.new_tokens,
        device=arguments.device,
        compute_dtype=arguments.dtype,
        threads=arguments.threads,
        kv_cache=arguments.kv_cache,
    )
    names = PROCESSES[arguments.engines[0]]
    measure(names, load, rounds=arguments.rounds, versions=arguments.versions, every_s=arguments.every)


def _measure_each(names: Iterable[str]) -> None:
    lines: dict[str, dict[str, Any]] = {}
    for name in names:
        again = [sys.executable, "-m", "bench.sampler", *sys.argv[1:], "--engines", name]
        printed = subprocess.run(again, check=True, stdout=subprocess.PIPE, text=True).stdout
        # vLLM logs to standard output as well.
        lines |= {line["case"]: line for line in map(json.loads, re.findall(r"^{.*}$", printed, re.M))}
    if {"vllm", "vllm bare"} <= lines.keys():
        ours, bare = lines["vllm"], lines["vllm bare"]
        ours["over_bare"] = round(ours["tokens_per_s"] / bare["tokens_per_s"], 4)
        ours["core_over_bare"] = round(ours["tokens_per_core_s"] / bare["tokens_per_core_s"], 4)
    for line in lines.values():
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
