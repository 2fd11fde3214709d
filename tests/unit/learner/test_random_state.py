"""Random states go through the journal's bytes; CUDA's generator is replaced by one that is here."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from learner.training.random_state import RandomState
from support.refusals import cannot_start

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def cuda_generator(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    generator = torch.Generator()

    def set_state(state: Tensor, device: torch.device) -> None:
        assert device == CUDA
        generator.set_state(state)

    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: generator.get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_state)
    return generator


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


def test_what_is_drawn_after_a_state_was_restored_is_drawn_again(cuda_generator: torch.Generator) -> None:
    state = RandomState.on(CUDA)
    drawn = torch.rand(3), torch.rand(3, generator=cuda_generator)
    RandomState.from_bytes(state.to_bytes(), cuda_bytes=len(state.cuda)).restore(CUDA)
    again = torch.rand(3), torch.rand(3, generator=cuda_generator)
    assert all(map(torch.equal, drawn, again))


def test_a_state_of_another_device_leaves_this_ones_generator(cuda_generator: torch.Generator) -> None:
    of_cpu, before = RandomState.on(CPU), cuda_generator.get_state()
    assert of_cpu.cuda == b""
    of_cpu.restore(CUDA)
    RandomState.on(CUDA).restore(CPU)
    assert torch.equal(cuda_generator.get_state(), before)


def test_a_state_that_torch_does_not_take_is_refused() -> None:
    with cannot_start("7 bytes"):
        RandomState(b"another").restore(CPU)
