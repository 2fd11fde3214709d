"""What only a CUDA device shows: that the CPU waits for nothing, and that late reading changes no logprob."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from node.rollout import SamplingParameters
from sampler.engines.engine import GenerationRequest
from sampler.engines.torch_engine import TorchEngine
from support.tiny_model import make_tiny_model

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
            engine.add(GenerationRequest(prompt, engine.tokenizer.encode(prompt), 4, sampling))
        while engine.running:
            engine.step()

    complete()  # The first use of a kernel may wait.
    torch.cuda.set_sync_debug_mode("error")
    try:
        complete()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_logprobs_are_those_of_the_model_on_a_cpu(engine: TorchEngine, model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    prompts = {prompt: engine.tokenizer.encode(prompt) for prompt in ("7", "abc def ghi 12345")}
    for prompt, token_ids in prompts.items():
        engine.add(GenerationRequest(prompt, token_ids, 4, PLAIN))
    while engine.running:
        for finished in engine.step():
            prompt_ids = prompts[finished.request_id]
            for completion in finished.completions:
                ids = torch.tensor(np.concatenate([prompt_ids, completion.token_ids])[None]).long()
                with torch.no_grad():
                    logprob = torch.log_softmax(model(ids[:, :-1]).logits[0, len(prompt_ids) - 1 :], dim=-1)
                expected = logprob.gather(-1, ids[0, len(prompt_ids) :, None]).squeeze(-1)
                np.testing.assert_allclose(completion.behaviour_logprob, expected, atol=1e-4)
