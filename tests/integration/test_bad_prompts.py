"""A run with a few bad prompts goes on: real coordinator, real sampler, real graders, a learner by hand."""

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from node.rollout import RolloutGroup
from node.wire import group_from_wire
from sampler.engines.torch_engine import TorchEngine
from support.bad_prompts import is_bad
from support.clock import ManualClock
from support.hub import HandDrain, running_hub
from support.identity import MadeRun, make_run
from support.sampler import learning, sampling
from support.tiny_model import make_tiny_model

TASKS = {
    "too_long": ("TooLong", "prompt_too_long"),
    "prompt_raises": ("PromptRaises", "prompt_failed"),
    "prompt_hangs": ("PromptHangs", "prompt_timed_out"),
    "grader_raises": ("GraderRaises", "grading_failed"),
    "grader_hangs": ("GraderHangs", "grading_timed_out"),
}
GROUPS = 60
"""Three epochs of twenty prompts, two of them bad."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, layers=1)


@pytest.fixture(scope="module")
def base(model_dir: Path) -> TorchEngine:
    return TorchEngine(model_dir, device="cpu", compute_dtype=torch.float32, threads=1, seed=0)


@pytest.fixture(autouse=True)
def same_threads_after() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return make_run(tmp_path, now=time.time())


async def pass_time(clock: ManualClock) -> None:
    """Let an hour of the coordinator's go by in a minute; samplers beat often enough to keep their leases."""
    while True:
        await asyncio.sleep(0.05)
        clock.advance(3.0)


async def train(drain: HandDrain, clock: ManualClock, *, groups: int, within_s: float) -> list[RolloutGroup]:
    """Train on each group by itself; give those that came in time."""
    trained: list[RolloutGroup] = []
    passing = asyncio.create_task(pass_time(clock))
    try:
        async with asyncio.timeout(within_s):
            while len(trained) < groups:
                response = await drain.hear()
                if response.WhichOneof("message") == "group":
                    trained.append(group_from_wire(response.group.group))
                    await drain.step(len(trained), trained[-1].group_id)
    except TimeoutError:
        pass
    finally:
        passing.cancel()
    return trained


@pytest.mark.parametrize("kind", TASKS)
async def test_bad_prompts_are_set_aside_with_their_reason_and_the_run_goes_on(
    kind: str, made: MadeRun, base: TorchEngine, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    name, reason = TASKS[kind]
    async with (
        running_hub(made, task=kind, prompts=20, max_staleness_versions=500) as hub,
        learning(hub, base, model_dir) as learner,
        sampling(
            made,
            hub.address,
            model_dir,
            custom_tasks={kind: f"support.bad_prompts:{name}"},
            grader_wall_limit_s=0.5,
        ),
    ):
        drain = await learner.drain(credits=1000)
        trained = await train(drain, hub.clock, groups=GROUPS, within_s=15)
        assert len(trained) == GROUPS, f"{len(trained)} groups, {len(caplog.records)} log lines"
        assert not any(is_bad(group.prompt_index) for group in trained)
        status = await learner.status()
        assert dict(status.slots)["abandoned"] >= 1
        assert {bad.reason for bad in status.bad_prompts} == {reason}
