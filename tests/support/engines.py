"""The engines installed here, one way to drive them all, and a slow twin that recomputes what they say."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, DynamicCache

from node.values.groups.rollout import Completion
from node.values.groups.sampling_parameters import SamplingParameters
from node.weights.format.digests import Words
from sampler.config import SamplerConfig
from sampler.engines.decoding.cached_model import cache_argument
from sampler.engines.engine import Engine, GenerationRequest
from sampler.engines.engine_registry import ENGINES, OF_KIND, has_vllm
from sampler.engines.own_process.process_engine import ProcessEngine
from sampler.engines.stepping import step_on
from sampler.engines.words.model_words import ArrayWords, copy_words
from sampler.sampler_role import load_configured_engine
from support.async_vllm import allow_async_scheduling
from support.gpu import DEVICE
from support.model_words import words_of
from support.step_exchanges import Scripted
from support.torch_engines import put_words, scores_of
from support.vllm_servers import options_of

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    # Few tokens, so that prompts and, after a swap, running completions take several steps to read.
    "torch": {"prefill_chunk_tokens": 16},
    "vllm": {"kv_cache_bytes": 64 << 20},
    # Less than a token takes.
    "remote": {"poll_s": 0.005},
}

OWN, TWO, CUDA, ASYNC = "-own", "-two", "-cuda", "-async"
"""End the name of an engine that is to run in a process of its own, or on two devices, or (-two-own) both; or
on a GPU, maybe (-cuda-own) in a process of its own; or to begin each step before the last one has ended."""

WAYS = [
    (engine, apply)
    for engine, apply in (
        ("torch", "spare"),
        ("torch", "in_place"),
        ("torch-own", "in_place"),
        ("torch-cuda", "spare"),
        ("torch-cuda", "in_place"),
        ("torch-cuda-own", "in_place"),
        ("vllm", "in_place"),
        ("vllm-async", "in_place"),
        ("vllm-own", "in_place"),
        ("vllm-two", "in_place"),
        ("vllm-cuda", "in_place"),
        ("vllm-cuda-own", "in_place"),
        ("remote", "in_place"),
        ("remote-two", "in_place"),
    )
    if engine.startswith("torch") or has_vllm("cuda" if CUDA in engine else "cpu")
]
"""Every engine that is installed here, in every process and with every way to give it a version."""


def marks_of(engine: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a test's parameter that names an engine: ``gpu`` where it needs one."""
    return [pytest.mark.gpu] if CUDA in engine else []


def tolerance_of(engine: str) -> float:
    """Return how far logprobs may be from those that transformers computes in float32 on a CPU, nats.

    On a GPU vLLM's attention multiplies float32 with the ten bits of TF32: 2.6e-3 nats and more on an H100.
    """
    return 2e-2 if engine.startswith("vllm" + CUDA) else 1e-4


NAMES = [pytest.param(name, marks=marks_of(name)) for name in sorted({name for name, _ in WAYS})]

assert ENGINES.keys() - OF_KIND.keys() == OPTIONS.keys()


def settings_of(engine: str, model_dir: Path, **options: Any) -> dict[str, Any]:
    """Return a sampler's settings for an engine of ``WAYS``, with the smallest memory; start its server."""
    name = engine.removesuffix(OWN).removesuffix(TWO).removesuffix(CUDA).removesuffix(ASYNC)
    workers = 2 if TWO in engine else 1
    if name == "remote":
        options |= options_of(model_dir, workers=workers)
    elif workers == 2:
        options["tensor_parallel"] = workers
    elif engine.endswith(ASYNC):
        allow_async_scheduling()
        options["async_scheduling"] = True
    return {
        "engine": name,
        "engine_process": "own" if engine.endswith(OWN) else "inside",
        "device": DEVICE if CUDA in engine else "cpu",
        "engine_options": {**OPTIONS[name], **options},
    }


def load(engine: str, model_dir: Path, *, apply: str = "auto", **options: Any) -> Engine:
    """Load an engine with the smallest memory, to compute in float32 in one thread."""
    settings = {"model_dir": model_dir, "apply": apply, "threads": 1, "seed": 7}
    config = SamplerConfig.model_validate({**settings, **settings_of(engine, model_dir, **options)})
    return load_configured_engine(config)


@dataclass(slots=True)
class Driven:
    """An engine with its versions, newest last; each test serves another."""

    engine: Engine
    apply: str
    model_dir: Path
    base: Words
    versions: dict[int, Words]
    tolerance: float = 1e-4
    """See ``tolerance_of``."""
    finished: dict[str, GenerationRequest] = field(default_factory=dict)
    """Completions that a step found and ``run_out`` has not returned."""

    @classmethod
    def of(cls, engine: Engine, apply: str, model_dir: Path, *, tolerance: float = 1e-4) -> "Driven":
        base = words_of(engine.weights.live, layout=engine.layout)
        return cls(engine, apply, model_dir, base, {0: base}, tolerance)

    @property
    def live(self) -> Words:
        return words_of(self.engine.weights.live, layout=self.engine.layout)

    def take(self, words: Words) -> int:
        """Change the live words as a verified version does, and serve them under the next number."""
        weights, layout = self.engine.weights, self.engine.layout
        if self.apply == "spare":
            assert weights.spares is not None
            spare = weights.spares.new_spare()
            copy_words(ArrayWords(words), spare, layout=layout)
            weights.spares.swap(spare)
        else:
            copy_words(ArrayWords(words), weights.live, layout=layout)
            weights.settle()
        version = max(self.versions) + 1
        self.versions[version] = words
        self.engine.serve(version)
        return version

    def add(self, prompt: str, sampling: SamplingParameters, *, completions: int = 3) -> None:
        self.engine.add(
            GenerationRequest(prompt, self.engine.tokenizer.encode(prompt), completions, sampling)
        )

    @property
    def shuffled(self) -> Words:
        """Another version: every tensor shuffled, which keeps its scale."""
        words, random = self.base.copy(), np.random.default_rng(5 + len(self.versions))
        for span in self.engine.layout.tensors:
            random.shuffle(words[span.start_word : span.start_word + span.words])
        return words

    def step(self) -> None:
        self.finished |= {request.request_id: request for request in self.engine.step()}

    def steps(self, count: int) -> None:
        """Take steps one after the other, as a sampler's thread does; a process would take some more."""
        if isinstance(self.engine, ProcessEngine):
            for _ in range(count):
                self.step()
        else:
            self._step_on(Scripted(*[()] * count, None))

    def run_out(self) -> dict[str, GenerationRequest]:
        while self.engine.running:
            self._step_on(Scripted())
        finished, self.finished = self.finished, {}
        return finished

    def _step_on(self, exchange: Scripted) -> None:
        step_on(self.engine, exchange)
        for results in exchange.told:
            self.finished |= {request.request_id: request for request in results.finished}

    def recomputed(
        self, prompt: str, completion: Completion, sampling: SamplingParameters
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Score every token with transformers in float32, under the version it names, without a cache.

        Returns:
            logprobs, kept masses; [n] each
        """
        token_ids = self.engine.tokenizer.encode(prompt)
        return scores_of(self.model_dir, self.versions, token_ids, completion, sampling)

    def assert_scored(
        self, prompt: str, completions: Iterable[Completion], sampling: SamplingParameters
    ) -> None:
        """Assert that logprobs and kept masses are those of the version that each token names."""
        for completion in completions:
            scores, masses = self.recomputed(prompt, completion, sampling)
            np.testing.assert_allclose(completion.behaviour_logprob, scores, atol=self.tolerance)
            assert (completion.kept_mass is None) == (not sampling.is_truncated)
            if completion.kept_mass is not None:
                np.testing.assert_allclose(completion.kept_mass, masses, atol=self.tolerance)

    def recomputed_over_kept_caches(self, prompt: str, completion: Completion) -> NDArray[np.float32]:
        """Score every token with transformers, each version going on with the cache of those before, [n]."""
        model = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32)
        ids = torch.from_numpy(
            np.concatenate([self.engine.tokenizer.encode(prompt), completion.token_ids])
        ).long()
        n, versions = len(completion.token_ids), completion.policy_version.tolist()
        cache, begin, logits = DynamicCache(config=model.config), 0, []
        for version in sorted(set(versions)):
            end = len(ids) - n - 1 + versions.index(version) + versions.count(version)
            put_words(model, self.versions[version])
            with torch.no_grad():
                logits.append(model(ids[None, begin:end], **{cache_argument(model): cache}).logits[0])
            begin = end
        scores = torch.log_softmax(torch.cat(logits)[-n:], dim=-1)
        return np.asarray(scores.gather(-1, ids[-n:, None])[:, 0].numpy(), np.float32)

    def greedy(self, prompt: str, *, tokens: int) -> list[int]:
        """Generate with transformers, under the newest version."""
        model: Any = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32)
        put_words(model, self.versions[max(self.versions)])
        ids = torch.from_numpy(self.engine.tokenizer.encode(prompt)).long()[None]
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
        )
        return [int(token) for token in made[0, ids.shape[1] :]]
