"""A sampler whose model has the layout and tokenizer of the run, and other words."""

import asyncio
from pathlib import Path

import pytest

from heterorl.v1 import common_pb2
from node.exit_code import ExitCode
from sampler.engines.torch.torch_engine import TorchEngine
from support.hub import running_hub
from support.identity import MadeRun
from support.sampler import learning, sampling
from support.tiny_model import make_tiny_model
from support.waiting import until


@pytest.fixture(scope="module")
def fine_tuned_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model like the run's, of another seed."""
    return make_tiny_model(tmp_path_factory.mktemp("fine-tuned"), hidden=32, layers=1, seed=1)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [str(record.__dict__["error"]) for record in caplog.records if "error" in record.__dict__]


async def test_a_sampler_with_another_base_that_came_before_the_learner_is_never_leased_to_and_ends(
    made: MadeRun, base: TorchEngine, model_dir: Path, fine_tuned_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_hub(made) as hub, sampling(made, hub.address, fine_tuned_dir) as sampler:
        await until(lambda: bool(hub.hub.peers.members))
        async with learning(hub, base, model_dir) as learner:
            await learner.drain(credits=8)
            assert await asyncio.wait_for(sampler.ending, timeout=20) is ExitCode.COULD_NOT_START
            assert sum((await learner.status()).slots.values()) == 0
    (error,) = errors(caplog)
    assert error.startswith("your model_dir is not the run's base")


async def test_the_runs_base_outlives_a_restart_of_the_coordinator(
    made: MadeRun, base: TorchEngine, model_dir: Path, fine_tuned_dir: Path
) -> None:
    async with running_hub(made) as hub, learning(hub, base, model_dir):
        pass
    async with (
        running_hub(made) as again,
        sampling(made, again.address, fine_tuned_dir) as sampler,
    ):
        assert await asyncio.wait_for(sampler.ending, timeout=20) is ExitCode.COULD_NOT_START


async def test_a_sampler_that_does_not_say_which_base_it_has_is_leased_nothing(made: MadeRun) -> None:
    root = b"r" * 16
    async with running_hub(made) as hub, hub.peer() as learner, hub.peer(made.sampler) as sampler:
        await learner.join(base_root=root)
        await learner.drain(credits=8)
        await hub.has_heard_learner()
        for number in (0, 3):
            sampler.held = common_pb2.PolicyVersion(number=number, root=root)
            await sampler.join(prompts=100)
            refused = await sampler.lease()
            assert (refused.waits_for, list(refused.leases)) == ("base model", [])
        sampler.held = common_pb2.PolicyVersion(number=0, root=root)
        await sampler.join(prompts=100, base_root=root)
        assert (await sampler.lease()).leases
        await sampler.join(prompts=100)  # one that was overtaken
        assert (await sampler.lease()).leases
        await sampler.join(prompts=100, instance="another process")
        assert (await sampler.lease()).waits_for == "base model"
