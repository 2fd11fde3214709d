"""An engine that fails in the middle of a whole sampler: restarted, leases given back, nothing doubled."""

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from node.exit_code import ExitCode
from node.rollout import RolloutGroup, check_group
from node.wire.rollouts import group_from_wire
from sampler.engines.torch_engine import TorchEngine
from support.hub import RunningHub, running_hub
from support.identity import MadeRun
from support.sampler import RunningSampler, learner_of, learning, sampling
from support.tiny_model import VOCABULARY_SIZE
from support.waiting import until


def failing(
    made: MadeRun, hub: RunningHub, model_dir: Path, faults: Path, **settings: Any
) -> AbstractAsyncContextManager[RunningSampler]:
    """Run a sampler whose engine fails as the file ``faults`` says, once it is there."""
    engine = {"engine": "support.failing_engine:load", "engine_options": {"faults": str(faults)}}
    return sampling(made, hub.address, model_dir, **engine, **settings)


@pytest.mark.parametrize("apply", ["spare", "in_place"])
async def test_an_engine_out_of_memory_is_restarted_and_the_version_held_is_served_again(
    made: MadeRun, base: TorchEngine, model_dir: Path, tmp_path: Path, apply: str
) -> None:
    faults = tmp_path / "faults"
    async with (
        running_hub(made, max_new_tokens=60, max_staleness_versions=50) as hub,
        learning(hub, base, model_dir) as learner,
        failing(made, hub, model_dir, faults, apply=apply) as sampler,
    ):
        await learner.publish(*learner_of(made, base).signed(1, None))
        await until(lambda: sampler.value("held_version") == 1)
        await generating(sampler)
        fetched = sampler.transferred("transfer_bytes_total", kind="keyframe", direction="in")
        faults.write_text("out of memory")
        await until(lambda: sampler.value("engine_restarts_total") == 1, within_s=60)
        await until(lambda: sampler.value("held_version") == 1, within_s=60)
        assert sampler.value("dropped_groups_total", reason="engine") >= 1
        assert sampler.value("swap_seconds_count") >= 3
        assert sampler.transferred("transfer_bytes_total", kind="keyframe", direction="in") == fetched
        before = int(sampler.value("groups_total", verdict="spooled"))
        await until(lambda: sampler.value("groups_total", verdict="spooled") >= before + 9, within_s=60)
        drain = await learner.drain(credits=before + 9)
        groups: list[RolloutGroup] = []
        while len(groups) < before + 9:
            response = await drain.hear()
            if response.WhichOneof("message") == "group":
                groups.append(group_from_wire(response.group.group))
                check_group(groups[-1], vocabulary_size=VOCABULARY_SIZE)
        assert len({group.group_id for group in groups}) == len(groups)
        # Those finished before may have been graded and submitted since.
        assert sum(group.newest_version == 1 for group in groups) >= 5
        assert await sampler.drained() is ExitCode.DRAINED
        assert (await learner.status()).slots.get("leased", 0) == 0


async def test_a_sampler_whose_engine_is_broken_gives_its_leases_back_and_ends(
    made: MadeRun, base: TorchEngine, model_dir: Path, tmp_path: Path
) -> None:
    faults = tmp_path / "faults"
    async with (
        running_hub(made, max_new_tokens=200, max_staleness_versions=50) as hub,
        learning(hub, base, model_dir) as learner,
        failing(made, hub, model_dir, faults) as sampler,
    ):
        await generating(sampler)
        faults.write_text("broken")
        async with asyncio.timeout(60):
            assert await sampler.ending is ExitCode.FAILED
        assert sampler.value("engine_restarts_total") == 3
        assert (await learner.status()).slots.get("leased", 0) == 0


async def generating(sampler: RunningSampler) -> None:
    """Wait until groups are in the engine."""
    await until(lambda: sampler.value("running_leases") >= 3, within_s=20)
    steps = sampler.value("decode_steps_total")
    await until(lambda: sampler.value("decode_steps_total") > steps + 3, within_s=20)
