"""Requests come, are cancelled and meet new versions at random: every logprob is that of the model alone."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from node.rollout import Finish, SamplingParameters
from sampler.engines.decoding.sampling import RowSampling, sampling_distribution
from sampler.engines.engine import FinishedRequest, GenerationRequest
from sampler.engines.engine_options import TorchOptions
from sampler.engines.model_words import copy_words
from sampler.engines.torch_engine import TorchEngine
from support.tiny_model import make_tiny_model

END = 1
ALPHABET = "0123456789+-= abcdefgh"


def loaded(directory: Path, **options: int) -> TorchEngine:
    return TorchEngine(
        directory,
        device="cpu",
        compute_dtype=torch.float32,
        threads=1,
        seed=7,
        options=TorchOptions.model_validate(options),
    )


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return models of the same layout; number n is served as version n."""
    made = tmp_path_factory.mktemp("models")
    return [make_tiny_model(made / str(seed), seed=seed) for seed in range(4)]


def scored(
    models: Sequence[PreTrainedModel],
    prompt: NDArray[np.int32],
    token_ids: NDArray[np.int32],
    versions: NDArray[np.int32],
    sampling: SamplingParameters,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return logprob and kept mass of each token under the version it names, by passes without a cache."""
    ids = torch.tensor(np.concatenate([prompt, token_ids])[None]).long()
    logprobs = np.zeros(len(token_ids), np.float32)
    masses = np.zeros(len(token_ids), np.float32)
    for version in set(versions.tolist()):
        with torch.no_grad():
            logits = models[version](ids[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
        rows = RowSampling.of([sampling] * len(token_ids), device=logits.device)
        logprob, mass = sampling_distribution(logits, rows)
        chosen = logprob.gather(-1, ids[0, len(prompt) :, None]).squeeze(-1).numpy()
        logprobs = np.where(versions == version, chosen, logprobs)
        masses = np.where(versions == version, mass.numpy(), masses)
    return logprobs, masses


@pytest.mark.parametrize("depth", [0, 1], ids=["read at once", "read a step late"])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_comes_and_goes_every_completion_is_scored_exactly(
    directories: list[Path], seed: int, depth: int
) -> None:
    random = np.random.default_rng(seed)
    engine = loaded(directories[0], memory_bytes=4 << 20, prefill_chunk_tokens=int(random.integers(1, 40)))
    engine._decoder._batch._is_cpu = depth == 0
    others = [loaded(directory).weights.live for directory in directories]
    requests: dict[str, GenerationRequest] = {}
    finished: dict[str, FinishedRequest] = {}
    cancelled: set[str] = set()
    version = 0

    def step() -> None:
        for one in engine.step():
            assert one.request_id not in finished.keys() | cancelled
            finished[one.request_id] = one

    for number in range(24):
        sampling = SamplingParameters(
            temperature=float(random.choice([1.0, 0.7])),
            top_p=float(random.choice([1.0, 0.9])),
            top_k=int(random.choice([0, 8])),
            max_new_tokens=int(random.integers(1, 90)),
            min_p=float(random.choice([0.0, 0.02])),
            stop=tuple(random.choice(list("abc7"), int(random.integers(0, 2)))),
        )
        prompt = engine.tokenizer.encode("".join(random.choice(list(ALPHABET), int(random.integers(1, 60)))))
        request = GenerationRequest(str(number), prompt, int(random.integers(1, 6)), sampling)
        engine.add(request)
        requests[request.request_id] = request
        for _ in range(int(random.integers(0, 20))):
            step()
        if random.random() < 0.2:
            gone = [name for name in requests if name not in finished and random.random() < 0.5]
            engine.cancel(gone)
            cancelled |= set(gone)
        if random.random() < 0.2 and version + 1 < len(others):
            version += 1
            copy_words(others[version], engine.weights.live, layout=engine.layout)
            engine.weights.settle()
            engine.serve(version)
        assert engine._decoder.held_bytes <= 4 << 20
    while engine.running:
        step()
    assert finished.keys() | cancelled == requests.keys()
    models = [AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32) for one in directories]
    for name, group in finished.items():
        request = requests[name]
        for completion in group.completions:
            arguments = (completion.token_ids, completion.policy_version, request.sampling)
            logprobs, masses = scored(models, request.prompt_token_ids, *arguments)
            np.testing.assert_allclose(completion.behaviour_logprob, logprobs, atol=1e-4)
            if completion.kept_mass is not None:
                np.testing.assert_allclose(completion.kept_mass, masses, atol=1e-4)
            ends = (completion.token_ids == END).nonzero()[0].tolist()
            assert ends == ([len(completion.token_ids) - 1] if completion.finish is Finish.END else [])
            found = [
                string
                for string in request.sampling.stop
                if string in engine.tokenizer.decode(completion.token_ids)
            ]
            assert bool(found) == (completion.finish is Finish.STOP)
            is_full = len(completion.token_ids) == request.sampling.max_new_tokens
            assert is_full or completion.finish is not Finish.LENGTH
