"""Requests come, are cancelled and meet new versions at random: every logprob is that of the model alone."""

from pathlib import Path

import numpy as np
import pytest

from node.values.groups.rollout import Finish
from node.values.groups.sampling_parameters import SamplingParameters
from sampler.engines.engine import GenerationRequest
from sampler.engines.words.model_words import copy_words
from support.model_words import words_of
from support.tiny_model import make_tiny_model
from support.torch_engines import made, scores_of

END = 1
ALPHABET = "0123456789+-= abcdefgh"


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return models of the same layout; number n is served as version n."""
    folder = tmp_path_factory.mktemp("models")
    return [make_tiny_model(folder / str(seed), seed=seed) for seed in range(4)]


@pytest.mark.parametrize(
    ("seed", "like"), [(0, "cpu"), (1, "cuda")], ids=["read at once", "read a step late"]
)
def test_whatever_comes_and_goes_every_completion_is_scored_exactly(
    directories: list[Path], seed: int, like: str
) -> None:
    random = np.random.default_rng(seed)
    chunk_tokens = int(random.integers(1, 40))
    engine = made(directories[0], like=like, memory_bytes=4 << 20, prefill_chunk_tokens=chunk_tokens)
    others = [made(directory).weights.live for directory in directories]
    requests: dict[str, GenerationRequest] = {}
    finished: dict[str, GenerationRequest] = {}
    cancelled: set[str] = set()
    version = 0

    def step() -> None:
        for one in engine.step():
            assert one.request_id not in finished.keys() | cancelled
            finished[one.request_id] = one

    for number in range(16):
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
        assert engine.cache_bytes <= 4 << 20
    while engine.running:
        step()
    assert finished.keys() | cancelled == requests.keys()
    words = {number: words_of(one, layout=engine.layout) for number, one in enumerate(others)}
    for name, group in finished.items():
        request = requests[name]
        for completion in group.completions:
            logprobs, masses = scores_of(
                directories[0], words, request.prompt_token_ids, completion, request.sampling
            )
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
