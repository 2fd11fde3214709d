"""Fixtures of a run of the tiny model: its files, an engine of its words.

The ``conftest.py`` of a folder imports those that its tests share.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sampler.engines.torch.torch_engine import TorchEngine
from support.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, layers=1)


@pytest.fixture(scope="module")
def base(model_dir: Path) -> TorchEngine:
    """Return an engine with the base model's words."""
    return TorchEngine(model_dir, device="cpu", compute_dtype=torch.float32, threads=1, seed=0)


@pytest.fixture(autouse=True)
def same_threads_after() -> Iterator[None]:
    """Leave torch as many threads as it had: a sampler and a learner in the test's process set their own."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
