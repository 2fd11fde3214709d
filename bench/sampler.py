"""How fast completions are generated through us, beside the bare engine. One JSON line per contestant.

    python -m bench.sampler                 a random model of 33 million parameters: two minutes
    python -m bench.sampler --model DIR     one of your own

    transformers, torch   transformers' own generate; the torch engine on its thread. One process, in turns,
                          so that both meet the same disturbances
    vllm bare, vllm       vLLM's own generate; the vllm engine on its thread. A process each; if installed

    tokens_per_s          of all rows together, by the clock; median over rounds
    tokens_per_core_s     by the processor time of the process, which others can hardly lengthen
    over_bare             tokens_per_s over the bare engine's: of the same round, then the median; for vllm
                          of the medians
    core_over_bare        likewise of tokens_per_core_s
    held_up_share         of the time, by which a version every ``--every`` seconds held generation up; its
                          words were at hand: what staging costs is bench/swap.py's
    swap_s                mean of these
    apart_nats            between behaviour logprob and the learner's, float32: mean of absolute differences
    farthest_nats         the largest
    load                  processes that wanted to run, a minute's mean: above the cores, others slowed this

The prompts of a group are equal, and all have the same length. Every contestant draws at temperature 1 from
the whole vocabulary.
"""

import argparse
import asyncio
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
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from transformers import AutoModelForCausalLM

from bench.measure import CORES
from bench.swap import SIZES, made_model
from learner.training.model import load_policy
from node.policy import PolicyVersion
from node.rollout import SamplingParameters
from sampler.config import SamplerConfig
from sampler.engines.engine import FinishedRequest, GenerationRequest
from sampler.engines.engine_registry import load_engine
from sampler.engines.engine_thread import EngineThread
from sampler.engines.model_words import ArrayWords, copy_words
from sampler.metrics import SamplerMetrics

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


class Contestant(Protocol):
    """Something that generates."""

    async def generate(self) -> int:
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

    async def generate(self) -> int:
        return await asyncio.to_thread(self._generate)

    def _generate(self) -> int:
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
        self._vllm: Any = importlib.import_module("vllm")
        self._load = load
        self._engine = self._vllm.LLM(
            model=str(load.model_dir),
            dtype=load.compute_dtype,
            max_model_len=load.prompt_tokens + load.new_tokens,
            max_num_seqs=load.groups * load.completions,
        )

    async def generate(self) -> int:
        sampling = self._vllm.SamplingParams(
            n=self._load.completions,
            temperature=1.0,
            max_tokens=self._load.new_tokens,
            logprobs=0,
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": prompt.tolist()} for prompt in self._load.prompts()]
        outputs = await asyncio.to_thread(self._engine.generate, prompts, sampling, use_tqdm=False)
        return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)


class Ours:
    """An engine of the sampler on its thread."""

    def __init__(self, load: Load, engine: str) -> None:
        self._load = load
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
            }
        )
        self.engine = load_engine(settings.engine, settings)
        self._registry = CollectorRegistry()
        self._thread = EngineThread(self.engine, metrics=SamplerMetrics(self._registry))
        self._finished: asyncio.Queue[FinishedRequest] = asyncio.Queue()
        self._version = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(self._thread.run(finished=self._finished.put_nowait, refused=_refused))
            await self.swap(lambda: None)
            yield
            run.cancel()

    async def groups(self) -> list[FinishedRequest]:
        """Complete every prompt."""
        self._add_all()
        return [await self._finished.get() for _ in range(self._load.groups)]

    async def generate(self) -> int:
        return sum(len(c.token_ids) for group in await self.groups() for c in group.completions)

    async def swap(self, change: Callable[[], object]) -> None:
        """Hand over the next version, which ``change`` puts in place."""
        self._version += 1

        def made() -> PolicyVersion:
            change()
            return PolicyVersion(self._version, bytes(16))

        await self._thread.hand_over(made)

    async def held_up(self, *, versions: int, every_s: float) -> tuple[float, float]:
        """Return the share of the time, and the seconds per version, that versions hold generation up."""
        change = self._changing()
        refilling = asyncio.create_task(self._refill())
        before, began = self._swap_seconds(), time.perf_counter()
        for number in range(1, versions + 1):
            await asyncio.sleep(max(0.0, began + number * every_s - time.perf_counter()))
            await self.swap(change)
        seconds = self._swap_seconds() - before
        wall = time.perf_counter() - began
        refilling.cancel()
        return seconds / wall, seconds / versions

    def _changing(self) -> Callable[[], object]:
        """Return what puts the words that are there in place once more, as those of another version."""
        weights, layout = self.engine.weights, self.engine.layout
        words = ArrayWords(np.concatenate([weights.live.read(frame) for frame in layout.frames]))
        if self._has_spare:
            spares = [weights.new_spare()]
            copy_words(words, spares[0], layout=layout)
            return lambda: spares.append(weights.swap(spares.pop()))

        def write() -> None:
            copy_words(words, weights.live, layout=layout)
            weights.settle()

        return write

    async def _refill(self) -> None:
        self._add_all()
        while True:
            self._add(int((await self._finished.get()).request_id))

    def _add_all(self) -> None:
        for number in range(self._load.groups):
            self._add(number)

    def _add(self, number: int) -> None:
        load = self._load
        prompt = load.prompts()[number]
        self._thread.add(GenerationRequest(str(number), prompt, load.completions, load.sampling))

    def _swap_seconds(self) -> float:
        return self._registry.get_sample_value("heterorl_sampler_swap_seconds_sum") or 0.0


def _refused(request_id: str, error: Exception) -> None:
    raise RuntimeError(f"request {request_id} was refused") from error


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
    return {"apart_nats": float(every.mean()), "farthest_nats": float(every.max()), "tokens": len(every)}


async def measure(names: Sequence[str], load: Load, *, rounds: int, versions: int, every_s: float) -> None:
    """Print a line for each contestant, and two more for each engine of ours."""
    contestants: dict[str, Contestant] = {}
    async with AsyncExitStack() as running:
        for name in names:
            if name == "transformers":
                contestants[name] = Transformers(load)
            elif name == "vllm bare":
                contestants[name] = BareVllm(load)
            else:
                contestants[name] = ours = Ours(load, name)
                await running.enter_async_context(ours.running())
        for contestant in contestants.values():
            await contestant.generate()
        turns = [{name: await _turn(one) for name, one in contestants.items()} for _ in range(rounds)]
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
                line |= apart(load, (await contestant.groups())[:2])
                share, seconds = await contestant.held_up(versions=versions, every_s=every_s)
                line |= {"held_up_share": share, "swap_s": seconds, "every_s": every_s}
            print(json.dumps(line), flush=True)


async def _turn(contestant: Contestant) -> Round:
    began, processor = time.perf_counter(), time.process_time()
    tokens = await contestant.generate()
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
    )
    names = PROCESSES[arguments.engines[0]]
    asyncio.run(
        measure(names, load, rounds=arguments.rounds, versions=arguments.versions, every_s=arguments.every)
    )


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
