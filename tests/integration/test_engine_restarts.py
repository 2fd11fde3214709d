"""An engine that fails in the middle of a whole sampler: restarted, leases given back, nothing doubled."""

import asyncio
import os
import signal
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.exit_code import ExitCode
from node.values.groups.rollout import RolloutGroup
from node.values.groups.well_formed import check_group
from sampler.engines.torch.torch_engine import TorchEngine
from support.hub import HandPeer, RunningHub, running_hub
from support.identity import MadeRun
from support.sampler import RunningPeer, learner_of, learning, sampling
from support.tiny_model import VOCABULARY_SIZE
from support.waiting import until
from support.warm_processes import ENGINES


def failing(
    made: MadeRun, hub: RunningHub, model_dir: Path, faults: Path, **settings: Any
) -> AbstractAsyncContextManager[RunningPeer]:
    """Run a sampler whose engine fails as the file ``faults`` says, once it is there."""
    engine = {"engine": "support.failing_engine:load", "engine_options": {"faults": str(faults)}}
    return sampling(made, hub.address, model_dir, **engine, **settings)


@pytest.mark.usefixtures("warm_engines")
@pytest.mark.parametrize("fault", ["out of memory", "killed"])
async def test_an_engine_that_fails_is_loaded_again_and_serves_the_version_held_and_nothing_is_doubled(
    made: MadeRun, base: TorchEngine, model_dir: Path, tmp_path: Path, fault: str
) -> None:
    faults = tmp_path / "faults"
    is_inside = fault == "out of memory"
    settings: dict[str, Any] = {"apply": "spare"} if is_inside else {"engine_process": "own"}
    async with (
        running_hub(made, max_new_tokens=60, max_staleness_versions=50) as hub,
        learning(hub, base, model_dir) as learner,
        failing(made, hub, model_dir, faults, **settings) as sampler,
    ):
        await learner.publish(*learner_of(made, base).signed(1, None))
        await until(lambda: sampler.value("held_version") == 1)
        await generating(sampler)
        fetched = sampler.transferred("transfer_bytes_total", kind="keyframe", direction="in")
        if is_inside:
            faults.write_text(fault)
        else:
            os.kill(engine_process(), signal.SIGKILL)
        await until(lambda: sampler.value("engine_restarts_total") == 1)
        await until(lambda: sampler.value("held_version") == 1)
        assert sampler.value("dropped_groups_total", reason="engine") >= 1
        assert sampler.value("swap_seconds_count") >= 3
        assert sampler.transferred("transfer_bytes_total", kind="keyframe", direction="in") == fetched
        groups = await spooled_from_now(learner, sampler, groups=6)
        # Those finished before may have been graded and submitted since.
        assert sum(group.newest_version == 1 for group in groups) >= 3
        processes = [] if is_inside else [engine_process()]
        assert await sampler.drained() is ExitCode.DRAINED
        assert not any(psutil.pid_exists(process) for process in processes)
        assert (await learner.status()).slots.get("leased", 0) == 0


async def test_a_sampler_whose_engine_cannot_be_mended_gives_its_leases_back_and_ends(
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


async def spooled_from_now(learner: HandPeer, sampler: RunningPeer, *, groups: int) -> list[RolloutGroup]:
    """Wait for more groups; return all there are, which are whole and different."""
    wanted = int(sampler.value("groups_total", verdict="spooled")) + groups
    await until(lambda: sampler.value("groups_total", verdict="spooled") >= wanted)
    found = await learner.groups(wanted)
    for group in found:
        check_group(group, vocabulary_size=VOCABULARY_SIZE)
    assert len({group.group_id for group in found}) == len(found)
    return found


def engine_process() -> int:
    """Return the number of the process that the sampler's engine has for itself."""
    [process] = [engine.pid for engine in ENGINES if engine.returncode is None]
    return process


async def generating(sampler: RunningPeer) -> None:
    """Wait until groups are in the engine."""
    await until(lambda: sampler.value("running_leases") >= 3)
    steps = sampler.value("decode_steps_total")
    await until(lambda: sampler.value("decode_steps_total") > steps + 3)
