"""Shown by a CUDA device only: that the CPU waits for nothing, and that late reading changes no logprob."""

from pathlib import Path

import pytest
import torch

from node.values.groups.sampling_parameters import SamplingParameters
from sampler.engines.torch.torch_engine import TorchEngine
from support.tiny_model import make_tiny_model
from support.torch_engines import assert_scored, request, run_out

pytestmark = pytest.mark.gpu

CUT = SamplingParameters(temperature=0.8, top_p=0.9, top_k=20, max_new_tokens=40, min_p=0.05)
PLAIN = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=40)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path)


@pytest.fixture
def engine(model_dir: Path) -> TorchEngine:
    return TorchEngine(model_dir, device="cuda", compute_dtype=torch.float32, threads=1, seed=7)


def test_no_step_waits_for_the_device(engine: TorchEngine) -> None:
    def complete() -> None:
        for prompt, sampling in (("7", PLAIN), ("abc def ghi 12345", PLAIN), ("3+4=", CUT)):
            engine.add(request(engine, prompt, completions=4, sampling=sampling))
        run_out(engine)

    complete()  # The first use of a kernel may wait.
    torch.cuda.set_sync_debug_mode("error")
    try:
        complete()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_logprobs_are_those_of_the_model_on_a_cpu(engine: TorchEngine, model_dir: Path) -> None:
    for prompt in ("7", "abc def ghi 12345"):
        engine.add(request(engine, prompt, completions=4, sampling=PLAIN))
    for prompt, group in run_out(engine).items():
        assert_scored(engine, model_dir, group, prompt, atol=1e-4)
