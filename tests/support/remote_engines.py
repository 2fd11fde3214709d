"""A vLLM server that answers as it is told, over real HTTP, and remote engines connected to it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.values.groups.sampling_parameters import SamplingParameters
from sampler.config import SamplerConfig
from sampler.engines.engine import Engine, GenerationRequest
from sampler.engines.remote.remote_engine import RemoteEngine
from sampler.engines.words.frame_memory import DIRECTORY_VARIABLE
from support.vllm_stub import VllmStub, listening, stub_of

Connect = Callable[..., RemoteEngine]

PLAIN = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=8)


@pytest.fixture
def server(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmStub]:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "weights"))
    with listening(stub_of(model_dir)) as stub:
        yield stub


@pytest.fixture
def engines() -> Iterator[list[RemoteEngine]]:
    """Engines that are closed after the test."""
    opened: list[RemoteEngine] = []
    yield opened
    for engine in opened:
        engine.close()


@pytest.fixture
def connect(server: VllmStub, engines: list[RemoteEngine], tmp_path: Path) -> Connect:
    """Connects to the server."""

    def connected(**options: Any) -> RemoteEngine:
        given: dict[str, Any] = {
            "address": server.address,
            "weights_dir": tmp_path / "weights",
            "poll_s": 0.02,
        }
        given |= {"start_limit_s": 5, "answer_limit_s": 5} | options
        engine = RemoteEngine(
            SamplerConfig(model_dir=server.model_dir, engine="remote", engine_options=given, seed=0)
        )
        engines.append(engine)
        return engine

    return connected


def asked(
    request_id: str = "a", *, completions: int = 1, sampling: SamplingParameters = PLAIN
) -> GenerationRequest:
    return GenerationRequest(request_id, np.array([5, 6], np.int32), completions, sampling)


def run_out(engine: Engine) -> dict[str, GenerationRequest]:
    finished: dict[str, GenerationRequest] = {}
    while engine.running:
        finished |= {request.request_id: request for request in engine.step()}
    return finished
