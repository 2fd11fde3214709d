"""Contestants of ``bench.sampler``: bare engines and ours, each of which completes the same prompts."""

import importlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from node.values.groups.sampling_parameters import SamplingParameters
from sampler.config import SamplerConfig
from sampler.engines.engine import GenerationRequest
from sampler.engines.stepping import RequestChange, StepResults, step_on
from sampler.engines.words.model_words import ArrayWords, copy_words
from sampler.process_tree import cpu_seconds
from sampler.sampler_role import load_configured_engine

T = TypeVar("T")

_OWN: Final = " own"
"""Ends the name of an engine in a process of its own."""


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts and settings that all contestants share; they are made for the largest of several."""

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
    def rows(self) -> int:
        return self.groups * self.completions

    @property
    def memory_share(self) -> float:
        """Share of memory for vLLM: half on a CPU, which others use as well."""
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


class Contestant(Protocol):
    """Something that generates."""

    load: Load

    def generate(self) -> int:
        """Complete every prompt; return the tokens drawn."""
        ...

    def processor_s(self) -> float:
        """Return the processor time taken so far."""
        ...


class _Measured:
    def processor_s(self) -> float:
        processes = psutil.Process().children()
        return time.process_time() + sum(cpu_seconds(process.pid) for process in processes)


class Transformers(_Measured):
    """transformers' generate, every completion a row."""

    def __init__(self, load: Load) -> None:
        self.load = load
        dtype = getattr(torch, load.compute_dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(
            load.model_dir, dtype=dtype, trust_remote_code=False
        )
        self._model = model.to(load.device)
        ends = self._model.generation_config.eos_token_id
        self._end_ids = torch.tensor([] if ends is None else ends, device=load.device)

    def generate(self) -> int:
        prompts = np.repeat(self.load.prompts(), self.load.completions, axis=0)
        ids = torch.tensor(prompts, device=self.load.device).long()
        drawn = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self.load.new_tokens,
            pad_token_id=0,
        )[:, ids.shape[1] :]
        ended = torch.isin(drawn, self._end_ids).int()
        # The end token counts; what follows it is padding.
        return int((ended.cumsum(dim=-1) - ended == 0).sum())


class BareVllm(_Measured):
    """vLLM's generate, in a process of vLLM's own on a GPU, as it comes."""

    def __init__(self, load: Load) -> None:
        if load.device == "cpu":
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        self._vllm: Any = importlib.import_module("vllm")
        self.load = load
        self._engine = self._vllm.LLM(
            model=str(load.model_dir),
            dtype=load.compute_dtype,
            max_model_len=load.prompt_tokens + load.new_tokens,
            max_num_seqs=load.rows,
            **({"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30} if load.device == "cpu" else {}),
            gpu_memory_utilization=load.memory_share,
        )

    def generate(self) -> int:
        sampling = self._vllm.SamplingParams(
            n=self.load.completions,
            temperature=1.0,
            max_tokens=self.load.new_tokens,
            logprobs=0,
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": prompt.tolist()} for prompt in self.load.prompts()]
        outputs = self._engine.generate(prompts, sampling, use_tqdm=False)
        return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)


@dataclass(slots=True)
class Flow:
    """The other end of an engine's steps: adds requests and counts what is finished."""

    request: Callable[[int], GenerationRequest]
    is_due: Callable[[], bool] = lambda: False
    """Whether something else is to be done before the next step."""
    repeats: Callable[[], bool] = lambda: False
    """Whether a finished group is added once more."""
    added: int = 0
    running: int = 0
    tokens: int = 0
    longest_turn_s: float = 0.0
    """The longest time between two looks at the results."""
    _next: list[RequestChange] = field(default_factory=list)
    _told_s: float = field(default_factory=time.perf_counter)

    def add(self, number: int) -> None:
        self._next.append(self.request(number))
        self.added, self.running = self.added + 1, self.running + 1

    def changes(self, *, running: int) -> Sequence[RequestChange] | None:
        if not self.running or self.is_due():
            return None
        changes, self._next = self._next, []
        return changes

    def tell(self, results: StepResults) -> None:
        self.longest_turn_s = max(self.longest_turn_s, time.perf_counter() - self._told_s)
        self._told_s = time.perf_counter()
        for finished in results.finished:
            self.tokens += sum(len(completion.token_ids) for completion in finished.completions)
            self.running -= 1
            if self.repeats():
                self.add(int(finished.request_id))


class Ours(_Measured):
    """An engine of the sampler, which steps on in its thread, as in a sampler."""

    def __init__(self, load: Load, engine: str, thread: ThreadPoolExecutor) -> None:
        self.load = load
        self._thread = thread
        self._has_spare = engine == "torch"
        settings = SamplerConfig.model_validate(
            {
                "model_dir": load.model_dir,
                "engine": engine.removesuffix(_OWN),
                "engine_process": "own" if engine.endswith(_OWN) else "inside",
                "device": load.device,
                "compute_dtype": load.compute_dtype,
                "apply": "spare" if self._has_spare else "in_place",
                "threads": load.threads,
                "seed": 0,
                "engine_options": {"kv_cache": load.kv_cache}
                | ({} if self._has_spare else {"memory_share": load.memory_share, "batch": load.rows}),
            }
        )
        self._engine = self._call(lambda: load_configured_engine(settings))
        self._version = 0

    def generate(self) -> int:
        flow = self._flow()
        self._call(lambda: step_on(self._engine, flow))
        return flow.tokens

    def lost(self, *, versions: int, every_s: float) -> dict[str, float]:
        """Measure what versions cost, against as many groups without them."""
        change = self._call(self._changing)
        through, flow, change_s = self._stream(change, versions=versions, every_s=every_s, groups=0)
        alone, flow_alone, _ = self._stream(change, versions=0, every_s=every_s, groups=flow.added)
        lost_s = through.seconds - through.tokens / alone.tokens_per_s
        lost_core_s = through.core_seconds - through.tokens / alone.tokens_per_core_s
        between_s = versions * every_s
        return {
            "lost_share": round(lost_s / between_s, 4),
            "lost_core_share": round(lost_core_s / between_s / self.load.threads, 4),
            "swap_s": round(change_s / versions, 4),
            "longest_turn_s": round(flow.longest_turn_s, 4),
            "longest_alone_s": round(flow_alone.longest_turn_s, 4),
        }

    def _stream(
        self, change: Callable[[], None], *, versions: int, every_s: float, groups: int
    ) -> tuple[Round, Flow, float]:
        """Keep every row busy until ``versions`` were taken and ``groups`` added; then finish these.

        Also returns the flow, and the seconds of all changes.
        """
        made, change_s, began, processor = 0, 0.0, time.perf_counter(), self.processor_s()
        flow = self._flow()
        flow.is_due = lambda: made < versions and time.perf_counter() >= began + (made + 1) * every_s
        flow.repeats = lambda: made < versions or flow.added < groups
        while flow.running:
            if flow.is_due():
                change_began = time.perf_counter()
                self._call(change)
                made += 1
                change_s += time.perf_counter() - change_began
            self._call(lambda: step_on(self._engine, flow))
        taken = Round(flow.tokens, time.perf_counter() - began, self.processor_s() - processor)
        return taken, flow, change_s

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

    def _flow(self) -> Flow:
        """Return a flow to which every group was added."""
        load = self.load
        prompts = load.prompts()
        flow = Flow(lambda n: GenerationRequest(str(n), prompts[n], load.completions, load.sampling))
        for number in range(load.groups):
            flow.add(number)
        return flow

    def _call(self, call: Callable[[], T]) -> T:
        return self._thread.submit(call).result()
