"""Accidents of a vLLM server amid completions: it is killed and started again, it hangs."""

import asyncio
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from node.exit_code import ExitCode
from node.values.groups.sampling_parameters import SamplingParameters
from sampler.engines.remote.vllm_server import ServerError
from sampler.engines.restartable_engine import RestartableEngine
from sampler.engines.torch.torch_engine import TorchEngine
from support.engines import Driven, load, settings_of
from support.hub import running_hub
from support.identity import MadeRun
from support.sampler import learner_of, learning, sampling
from support.tiny_model import make_tiny_model
from support.vllm_servers import StartedServer, server_of
from support.waiting import until

LONG = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=100)
SHORT = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=8)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base"), head_size=32)


@pytest.fixture
def server(model_dir: Path) -> StartedServer:
    return server_of(model_dir)


@pytest.fixture
def driven(model_dir: Path, server: StartedServer) -> Iterator[Driven]:
    """An engine that holds another version than the base model, amid completions."""
    engine = RestartableEngine(partial(load, "remote", model_dir, answer_limit_s=10))
    driven = Driven.of(engine, "in_place", model_dir)
    driven.take(driven.shuffled)
    driven.add("3+4=", LONG, completions=4)
    while engine.waiting:
        driven.step()
    yield driven
    engine.close()


def assert_begins_again(driven: Driven) -> None:
    words = driven.versions[max(driven.versions)]
    np.testing.assert_array_equal(driven.live, driven.base)
    assert driven.engine.running == 0
    driven.take(words)
    driven.add("5-2=", SHORT)
    finished = driven.run_out()
    assert set(finished) == {"5-2="}
    for completion in finished["5-2="].completions:
        assert set(completion.policy_version) == {max(driven.versions)}
    driven.assert_scored("5-2=", finished["5-2="].completions, SHORT)


def test_a_server_that_is_killed_and_started_again_is_found_with_the_base_model(
    driven: Driven, server: StartedServer
) -> None:
    server.kill()
    with pytest.raises(ServerError, match="cannot be reached"):
        driven.run_out()
    server.start()
    assert isinstance(driven.engine, RestartableEngine)
    driven.engine.restart()
    assert_begins_again(driven)


def test_a_server_that_hangs_is_connected_to_again_once_it_answers(
    driven: Driven, server: StartedServer
) -> None:
    server.send(signal.SIGSTOP)
    with pytest.raises(ServerError, match="does not answer within 10"):
        driven.engine.cancel([])
    server.send(signal.SIGCONT)
    assert isinstance(driven.engine, RestartableEngine)
    driven.engine.restart()
    assert_begins_again(driven)


async def test_a_sampler_whose_server_is_killed_goes_on_with_its_version_and_doubles_nothing(
    made: MadeRun, model_dir: Path, server: StartedServer
) -> None:
    base = TorchEngine(model_dir, device="cpu", compute_dtype=torch.float32, threads=1, seed=0)
    async with (
        running_hub(made, max_new_tokens=40, max_staleness_versions=50) as hub,
        learning(hub, base, model_dir) as learner,
        sampling(
            made, hub.address, model_dir, apply="in_place", **settings_of("remote", model_dir)
        ) as sampler,
    ):
        await learner.publish(*learner_of(made, base).signed(1, None))
        await until(lambda: sampler.value("held_version") == 1)
        await until(lambda: sampler.value("groups_total", verdict="spooled") >= 1)
        fetched = sampler.transferred("transfer_bytes_total", kind="keyframe", direction="in")
        await asyncio.to_thread(server.kill)
        await until(lambda: sampler.value("engine_restarts_total") == 1)
        assert sampler.value("held_version") == -1
        server.start()
        await until(lambda: sampler.value("held_version") == 1, within_s=200)
        assert sampler.value("dropped_groups_total", reason="engine") >= 1
        assert sampler.transferred("transfer_bytes_total", kind="keyframe", direction="in") == fetched
        wanted = int(sampler.value("groups_total", verdict="spooled")) + 4
        await until(lambda: sampler.value("groups_total", verdict="spooled") >= wanted)
        groups = await learner.groups(wanted)
        assert len({group.group_id for group in groups}) == wanted
        assert await sampler.drained() is ExitCode.DRAINED
        assert (await learner.status()).slots.get("leased", 0) == 0
