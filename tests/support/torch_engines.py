"""A torch engine of the tiny model, driven step by step, and a slow twin that scores what it drew."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from node.values.groups.rollout import Completion
from node.values.groups.sampling_parameters import SamplingParameters
from node.weights.format.model_tensors import canonical_tensors
from sampler.engines.decoding.sampling import RowSampling, sampling_distribution
from sampler.engines.engine import GenerationRequest
from sampler.engines.engine_options import TorchOptions
from sampler.engines.torch.torch_engine import TorchEngine
from sampler.engines.words.model_words import ArrayWords, copy_words
from support.model_words import words_of
from support.tiny_model import make_tiny_model

PLAIN = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=12)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base"))


def made(model_dir: Path, *, like: str = "cpu", **options: Any) -> TorchEngine:
    """Load an engine that reads what it drew, and fills gaps in its batch, as on such a device."""
    engine = TorchEngine(
        model_dir,
        device="cpu",
        compute_dtype=torch.float32,
        threads=1,
        seed=7,
        options=TorchOptions(**options),
    )
    if like == "cuda":
        engine._batch._is_cpu = False
    return engine


def other_words(tmp_path: Path, seed: int) -> NDArray[np.uint16]:
    other = make_tiny_model(tmp_path / str(seed), seed=seed)
    return live(TorchEngine(other, device="cpu", compute_dtype=torch.float32, threads=1, seed=0))


def live(engine: TorchEngine) -> NDArray[np.uint16]:
    return words_of(engine.weights.live, layout=engine.layout)


def load(engine: TorchEngine, words: NDArray[np.uint16], version: int) -> None:
    """Change the live words as a verified version does."""
    spare = engine.weights.new_spare()
    copy_words(ArrayWords(words), spare, layout=engine.layout)
    engine.weights.swap(spare)
    engine.serve(version)


def request(
    engine: TorchEngine,
    prompt: str,
    *,
    name: str = "",
    completions: int = 3,
    sampling: SamplingParameters = PLAIN,
) -> GenerationRequest:
    return GenerationRequest(name or prompt, engine.tokenizer.encode(prompt), completions, sampling)


def run_out(engine: TorchEngine) -> dict[str, GenerationRequest]:
    finished: dict[str, GenerationRequest] = {}
    while engine.running:
        finished |= {f.request_id: f for f in engine.step()}
    return finished


def scores_of(
    model_dir: Path,
    words: Mapping[int, NDArray[np.uint16]],
    prompt: NDArray[np.int32],
    completion: Completion,
    sampling: SamplingParameters = PLAIN,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Score every token under the version it names, by transformers without cache, batch or padding.

    Returns:
        logprobs, kept masses; [n] each
    """
    model = _model(model_dir)
    ids, n = (
        torch.from_numpy(np.concatenate([prompt, completion.token_ids])).long(),
        len(completion.token_ids),
    )
    scores, masses = np.empty(n, np.float32), np.empty(n, np.float32)
    for version in set(completion.policy_version.tolist()):
        put_words(model, words[version])
        with torch.no_grad():
            logits = model(ids[None], use_cache=False).logits[0, -n - 1 : -1]
        distribution = sampling_distribution(logits, RowSampling.of([sampling] * n, device=logits.device))
        drawn = distribution.logprob.gather(-1, ids[-n:, None])[:, 0]
        mine = completion.policy_version == version
        scores[mine], masses[mine] = drawn.numpy()[mine], distribution.kept_mass.numpy()[mine]
    return scores, masses


@functools.lru_cache(maxsize=2)
def _model(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def put_words(model: Any, words: NDArray[np.uint16]) -> None:
    """Load the words of a version into a model, all of them bfloat16."""
    start = 0
    with torch.no_grad():
        for tensor in canonical_tensors(model.state_dict()).values():
            part = torch.from_numpy(words[start : start + tensor.numel()].copy())
            tensor.copy_(part.view(torch.bfloat16).view(tensor.shape))
            start += tensor.numel()


def assert_scored(
    engine: TorchEngine,
    model_dir: Path,
    group: GenerationRequest,
    prompt: str,
    *,
    words: Mapping[int, NDArray[np.uint16]] | None = None,
    sampling: SamplingParameters = PLAIN,
    atol: float = 1e-5,
) -> None:
    """Assert that logprobs and kept masses are exact, by the versions' words or those the engine has."""
    words = {0: live(engine)} if words is None else words
    for completion in group.completions:
        scores, masses = scores_of(model_dir, words, engine.tokenizer.encode(prompt), completion, sampling)
        np.testing.assert_allclose(completion.behaviour_logprob, scores, atol=atol)
        if completion.kept_mass is not None:
            np.testing.assert_allclose(completion.kept_mass, masses, atol=max(atol, 1e-5))
